"""A parameter whose update is still due: whoever reads it does the update first, nobody else does.

The counterpart of :mod:`tlsched.shim.promise`. From step() until its update a parameter's class is
a subclass that sees every use from Python. Uses that tell no values (its gradient, its shape) pass;
any other one asks the parameter's bucket first. So a reader that no guard knows (weight averaging,
logging, a list of parameters that somebody kept) gets the updated value wherever he stands.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from tlsched.errors import TrainingError
from tlsched.shim.promise import METADATA

_NO_VALUES = METADATA | {
    descriptor
    for name in ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    for getset in (getattr(torch.Tensor, name),)
    for descriptor in (getset.__get__, getset.__set__, getset.__delete__)
} | {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}  # fmt: skip


class Owner(Protocol):
    """What stands behind a pending parameter: a bucket."""

    def read_late(self, parameter: Parameter) -> None:
        """Do the update of ``parameter`` (which gives it its own class back), or raise."""


class PendingParameter(Parameter):
    """A parameter between step() and its update. Made by :func:`mark`, never constructed."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every use from Python."""
        kwargs = kwargs or {}
        if func in _NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _update(args)
        _update(kwargs.values())
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the updated parameter."""
        _update((self,))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the updated parameter."""
        _update((self,))
        return self.__reduce_ex__(protocol)


# By the parameter's id, and with its own class: an attribute would travel with copies and pickles.
_owners: dict[int, tuple[Owner, type[Parameter]]] = {}
_classes: dict[type[Parameter], type[Parameter] | None] = {Parameter: PendingParameter}


def can_be_marked(parameter: Parameter) -> bool:
    """Whether :func:`mark` can do its work on this class of parameters."""
    own = type(parameter)
    if own not in _classes:
        try:
            _classes[own] = type(f"Pending{own.__name__}", (PendingParameter, own), {})
            parameter.__class__ = _classes[own]  # type: ignore[assignment]  # tried, and undone
            parameter.__class__ = own
        except TypeError:
            _classes[own] = None
    return _classes[own] is not None


def mark(parameter: Parameter, owner: Owner) -> None:
    """``owner`` does an update before ``parameter`` is read. See :func:`can_be_marked`."""
    if id(parameter) not in _owners:
        own = type(parameter)
        _owners[id(parameter)] = (owner, own)
        parameter.__class__ = _classes[own]  # type: ignore[assignment]  # that is the point


def unmark(parameter: Parameter) -> None:
    """Give ``parameter`` its own class back; harmless when it has it."""
    entry = _owners.pop(id(parameter), None)
    if entry is not None:
        parameter.__class__ = entry[1]


def stale(name: str) -> TrainingError:
    """What to raise when the parameter ``name`` turns out to have been used too early."""
    return TrainingError(
        f"a forward pass used {name} before its last update was done",
        hint="this reader escapes tlsched (code in C++?): call run.flush() before it, or use "
        'policy="sync"',
    )


def _update(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, PendingParameter):
            entry = _owners.get(id(value))
            if entry is not None:
                entry[0].read_late(value)
        elif isinstance(value, (list, tuple)):
            _update(value)
        elif isinstance(value, dict):
            _update(value.values())
