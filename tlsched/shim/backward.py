"""Where a backward ends, and whether it ended well.

autograd calls back at the end of a graph task, but not after an exception, and not at the end of an
outer task all of whose gradients come from tasks nested in it (a model wholly inside reentrant
checkpointing). So torch.autograd.backward(), through which every backward passes, the nested ones
too, is watched while a context is open.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch


class Listener(Protocol):
    """A training context, as seen from here."""

    def backward_began(self) -> None:
        """The outermost backward begins."""

    def backward_ended(self) -> None:
        """The outermost backward has returned."""

    def backward_failed(self) -> None:
        """The outermost backward has raised."""


_listeners: dict[int, Listener] = {}
_lock = threading.Lock()
# Counted for the whole process: autograd may run a nested backward in a thread of its own.
_depth = 0
_original: Any = None


def watch(listener: Listener) -> None:
    """Tell ``listener`` of every backward from now on."""
    global _original
    with _lock:
        if not _listeners:
            _original = torch.autograd.backward
            torch.autograd.backward = _watched(_original)
        _listeners[id(listener)] = listener


def unwatch(listener: Listener) -> None:
    """Undo :func:`watch`; harmless when there was none."""
    with _lock:
        if _listeners.pop(id(listener), None) is not None and not _listeners:
            torch.autograd.backward = _original


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if _go(1) == 1:
            for listener in list(_listeners.values()):
                listener.backward_began()
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if _go(-1) == 0:
                for listener in list(_listeners.values()):
                    listener.backward_failed()
            raise
        if _go(-1) == 0:
            for listener in list(_listeners.values()):
                listener.backward_ended()
        return result

    return backward


def _go(by: int) -> int:
    global _depth
    with _lock:
        _depth += by
        return _depth
