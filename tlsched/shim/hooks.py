"""Hooks on a model that stay behind when the model is copied or pickled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class Uncopied:
    """Calls ``call``. In a copy of the model, or in a pickle of it, nothing is left of it.

    What stands in its place there accepts anything, does nothing and belongs to the standard
    library, so that who loads the model needs no tlsched.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """What the hook does."""
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Nothing, as a hook."""
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        """Nothing, as a hook."""
        return getattr, (contextlib.nullcontext(), "__exit__")
