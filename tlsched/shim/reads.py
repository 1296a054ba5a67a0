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

from torch.nn import Module, Parameter


class Watching(Protocol):
    """A training context, as seen from here."""

    model: Module

    def settle_updates(self) -> None:
        """Do the updates that are due."""


_contexts: dict[int, Watching] = {}
_owners: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_lock = threading.Lock()
_quiet = threading.local()

_MODULE_READS = ("parameters", "named_parameters", "state_dict")
_PARAMETER_READS = ("__deepcopy__", "__reduce_ex__")


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


def _patch() -> None:
    for name in _MODULE_READS:
        _replace(Module, name, _settling_module)
    for name in _PARAMETER_READS:
        _replace(Parameter, name, _settling_all)
    _replace(Module, "train", _settling_on_change)
    _replace(Module, "zero_grad", _quietly)


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


def _settle(module: Module) -> None:
    owner = _owners.get(module)
    if owner is not None and not getattr(_quiet, "on", False):
        context = _contexts.get(owner)
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


def _settling_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Parameter, *args: Any, **kwargs: Any) -> Any:
        for context in list(_contexts.values()):
            context.settle_updates()
        return original(self, *args, **kwargs)

    return method


def _quietly(original: Callable[..., Any]) -> Callable[..., Any]:
    """zero_grad() walks the parameters but reads none of their values."""

    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        before, _quiet.on = getattr(_quiet, "on", False), True
        try:
            return original(self, *args, **kwargs)
        finally:
            _quiet.on = before

    return method
