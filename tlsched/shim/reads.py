"""Reads of the parameters that no guard sees: state_dict(), parameters(), eval(), copies.

While a context is open, a few methods of torch.nn.Module and Parameter look first whether an update
is still due on the model they belong to. The class is changed and not the instance, so that
submodules are covered and a copy of the model does not carry our methods away.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer

from tlsched.shim import compiled


class Watching(Protocol):
    """A training context, as seen from here."""

    model: Module

    def settle_updates(self) -> None:
        """Do the updates that are due."""

    def steps_with(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` is one of this context's."""

    def enter_compiled(self) -> None:
        """Compiled code begins that the model does not know of."""

    def walk_parameters(self) -> None:
        """Somebody is given all parameters, and may read them."""


_contexts: dict[int, Watching] = {}
_owners: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_lock = threading.Lock()
_quiet = threading.local()

_stop_watching_entries: list[Callable[[], None]] = []


def watch(context: Watching) -> None:
    """Settle ``context`` whenever somebody is about to read its model's parameters."""
    with _lock:
        if not _contexts:
            _patch()
        _contexts[id(context)] = context
        for module in context.model.modules():
            _owners[module] = id(context)


def unwatch(context: Watching) -> None:
    """Undo :func:`watch`; harmless when there was none."""
    with _lock:
        if _contexts.pop(id(context), None) is None:
            return
        for module in context.model.modules():
            if _owners.get(module) == id(context):
                del _owners[module]
        if not _contexts:
            _restore()


def can_watch_compiled() -> bool:
    """Whether compiled functions can be seen to begin."""
    return bool(_stop_watching_entries)


def _patch() -> None:
    for name in ("parameters", "named_parameters"):
        _replace(Module, name, _walking)
    _replace(Module, "state_dict", _settling_module)
    _replace(Module, "train", _settling_on_change)
    _replace(Module, "zero_grad", _quietly)
    _replace(Optimizer, "zero_grad", _quietly)
    Optimizer.state = property(_get_state, _set_state)  # type: ignore[assignment]  # see _get_state
    stop = compiled.watch_entries(_entering_compiled)
    if stop is not None:
        _stop_watching_entries.append(stop)


def _replace(
    owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def _restore() -> None:
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    del Optimizer.state  # type: ignore[misc]  # the property, not an instance
    while _stop_watching_entries:
        _stop_watching_entries.pop()()


def _context_of(module: Module) -> Watching | None:
    owner = _owners.get(module)
    if owner is None or getattr(_quiet, "on", False):
        return None
    return _contexts.get(owner)


def _settle(module: Module) -> None:
    context = _context_of(module)
    if context is not None:
        context.settle_updates()


def _settling_module(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        _settle(self)
        return original(self, *args, **kwargs)

    return method


def _settling_on_change(original: Callable[..., Any]) -> Callable[..., Any]:
    """train() and eval() every iteration are common and free, as long as they change nothing."""

    def method(self: Module, mode: bool = True) -> Any:
        if self.training != mode:
            _settle(self)
        return original(self, mode)

    return method


def _walking(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        context = _context_of(self)
        if context is not None:
            context.walk_parameters()
        return original(self, *args, **kwargs)

    return method


def _quietly(original: Callable[..., Any]) -> Callable[..., Any]:
    """zero_grad() walks the parameters but reads none of their values."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _quiet.on = getattr(_quiet, "on", False), True
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return original(self, *args, **kwargs)
        finally:
            _quiet.on = before

    return method


def _get_state(optimizer: Optimizer) -> Any:
    """The optimizer's state, which a property of the class guards while a context is open.

    The instance keeps it where it always was; only the look-up passes here.
    """
    for context in _contexts.values():
        if context.steps_with(optimizer):
            context.settle_updates()
    try:
        return optimizer.__dict__["state"]
    except KeyError:
        raise AttributeError("state") from None


def _set_state(optimizer: Optimizer, state: Any) -> None:
    optimizer.__dict__["state"] = state


def _entering_compiled() -> None:
    for context in list(_contexts.values()):
        context.enter_compiled()
