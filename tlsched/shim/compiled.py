"""torch.compile: where compiled code begins, the parameters it reads must be up to date.

Compiled code runs no hooks that were registered after it was compiled, so guards inside it would be
passed by. They are put where it begins: on the compiled modules of the model, each waiting for all
parameters below it. Compiled functions that the model does not know of wait for every update.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.overrides import TorchFunctionMode

# The attribute that holds the compiled callable, by how the module was compiled.
_OPTIMIZED_MODULE = "forward"  # torch.compile(module)
_IN_PLACE = "_compiled_call_impl"  # module.compile()

_inside = threading.local()


class Boundary:
    """Calls ``before()`` ahead of a module's compiled code, until it is removed."""

    def __init__(
        self, module: Module, attribute: str, before: Callable[[], None], hide: Any = None
    ) -> None:
        self._module, self._attribute = module, attribute
        self._original = original = module.__dict__[attribute]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            before()
            outer, _inside.known = getattr(_inside, "known", False), True
            try:
                with _hidden(hide):
                    return original(*args, **kwargs)
            finally:
                _inside.known = outer

        self._call = call
        module.__dict__[attribute] = call

    def remove(self) -> None:
        """Put the compiled code back in its place."""
        if self._module.__dict__.get(self._attribute) is self._call:
            self._module.__dict__[self._attribute] = self._original


def boundaries(model: Module) -> dict[str, tuple[Module, str]]:
    """The outermost compiled modules of ``model`` by name, with the attribute that is compiled."""
    found: dict[str, tuple[Module, str]] = {}
    for name, module in model.named_modules():
        if any(_below(name, outer) for outer in found):
            continue
        if isinstance(module, torch._dynamo.OptimizedModule):
            found[name] = (module, _OPTIMIZED_MODULE)
        elif module.__dict__.get(_IN_PLACE) is not None:
            found[name] = (module, _IN_PLACE)
    return found


def outermost(name: str, among: Mapping[str, object]) -> str | None:
    """The compiled module of ``among`` that contains the module ``name``, or is it."""
    return next((outer for outer in among if _below(name, outer)), None)


def guard(
    model: Module, needs: Mapping[str, tuple[Any, ...]], wait: Callable[[tuple[Any, ...]], None]
) -> list[Boundary]:
    """Call ``wait`` with what ``needs`` names for a compiled module ahead of its compiled code."""
    return [
        Boundary(module, attribute, functools.partial(wait, needs.get(name, ())))
        for name, (module, attribute) in boundaries(model).items()
    ]


def inside_known() -> bool:
    """Whether the compiled code that begins now has waited for its own parameters."""
    return getattr(_inside, "known", False)


def watch_entries(call: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``call`` whenever compiled code begins. Returns how to stop that.

    None when this version of torch has no such place: then compiled functions cannot be guarded.
    """
    frames = torch._dynamo.eval_frame
    original = getattr(frames, "_callback_from_stance", None)
    if original is None:
        return None

    def entered(callback: Any) -> Any:
        if callable(callback) and not inside_known():
            call()
        return original(callback)

    frames._callback_from_stance = entered

    def stop() -> None:
        if frames._callback_from_stance is entered:
            frames._callback_from_stance = original

    return stop


@contextmanager
def _hidden(mode: TorchFunctionMode | None) -> Iterator[None]:
    """Take ``mode`` off the stack if it lies on top: under a mode, code is compiled anew."""
    on_top = torch.overrides._get_current_function_mode()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if mode is None or on_top is not mode:
        yield
        return
    torch.overrides._pop_mode()  # type: ignore[no-untyped-call]  # idem
    try:
        yield
    finally:
        torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]  # idem


def _below(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")
