"""What an optimizer keeps besides its parameters and their state: its settings and attributes.

A trial step may change them, in place too, so they are copied as deep as they go. What cannot be
copied and compared that way (another optimizer, a closure, the parameters once more) could change
behind the trial's back, so such an optimizer is not tried.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

# Elsewhere looked after, or torch's own: "defaults" serve groups that are added.
_NOT_SETTINGS = frozenset({"params", "state", "param_groups", "defaults", "step"})
_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
_CODE = (
    types.BuiltinFunctionType,
    types.ModuleType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_SEQUENCES = (list, tuple, set, frozenset, deque, torch.Size)
_MAPPINGS = (dict, OrderedDict, defaultdict)


def why_not_tried(optimizer: Optimizer) -> str | None:
    """What ``optimizer`` keeps that no trial could undo, or None."""
    name = type(optimizer).__name__
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        return f"{name} keeps state that belongs to no parameter"
    tensors = [id(t) for t in _tensors(optimizer.state)]
    if len(tensors) > len(set(tensors)):
        return f"{name} keeps one tensor in the state of several parameters"
    for group in optimizer.param_groups:
        for key, value in _settings(group).items():
            if (kind := _opaque(value)) is not None:
                return f"{name} keeps {kind} in its setting {key!r}"
    for key, value in _settings(optimizer.__dict__).items():
        if (kind := _opaque(value)) is not None:
            return f"{name} keeps {kind} in its attribute {key!r}"
    return None


class Belongings:
    """Copies of what a step of ``optimizer`` may change besides parameters, gradients and state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._copies = _copies(_of(optimizer))
        self._random = torch.get_rng_state()

    def restore(self) -> None:
        """Put everything back."""
        optimizer = self._optimizer
        groups, own = _copies(self._copies)
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for key in _settings(group).keys() - settings.keys():
                del group[key]
            group.update(settings)
        for key in _settings(optimizer.__dict__).keys() - own.keys():
            del optimizer.__dict__[key]
        optimizer.__dict__.update(own)
        torch.set_rng_state(self._random)

    def changed(self) -> str | None:
        """What is no longer as it was."""
        groups, own = self._copies
        groups_now, own_now = _of(self._optimizer)
        for now, before in zip(groups_now, groups, strict=True):
            if (key := _first_difference(now, before)) is not None:
                return f"its setting {key!r}"
        if (key := _first_difference(own_now, own)) is not None:
            return f"its attribute {key!r}"
        if not torch.equal(torch.get_rng_state(), self._random):
            return "the random generator's state"
        return None


_Settings = dict[str, Any]


def _of(optimizer: Optimizer) -> tuple[list[_Settings], _Settings]:
    return [_settings(group) for group in optimizer.param_groups], _settings(optimizer.__dict__)


def _settings(values: dict[str, Any]) -> _Settings:
    return {k: v for k, v in values.items() if k not in _NOT_SETTINGS and not k.endswith("_hooks")}


def _copies(of: tuple[list[_Settings], _Settings]) -> tuple[list[_Settings], _Settings]:
    # At once: what is the same object in two places stays one object. Modules cannot be copied.
    memo = {
        id(value): value
        for values in (*of[0], of[1])
        for value in values.values()
        if isinstance(value, _CODE)
    }
    return copy.deepcopy(of, memo)


def _opaque(value: Any) -> str | None:
    """What there is in ``value`` that cannot be copied and compared, in words."""
    if isinstance(value, Parameter):
        return "a parameter"
    if isinstance(value, torch.Tensor):
        return "a tensor with a history" if value.grad_fn is not None else None
    if isinstance(value, (*_ATOMS, *_CODE)):
        return None
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        return None
    if type(value) in _SEQUENCES:
        inner = [*value]
    elif type(value) in _MAPPINGS:
        inner = [*value.keys(), *value.values()]
    else:
        return f"an object of type {type(value).__name__}"
    return next((kind for each in inner if (kind := _opaque(each)) is not None), None)


def _tensors(state: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    for of_parameter in state.values():
        if isinstance(of_parameter, dict):
            yield from (value for value in of_parameter.values() if isinstance(value, torch.Tensor))


def _first_difference(now: _Settings, before: _Settings) -> str | None:
    for key in now.keys() | before.keys():
        if key not in now or key not in before or not _same(now[key], before[key]):
            return key
    return None


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if type(a) in (list, tuple, deque, torch.Size):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a) in _MAPPINGS:
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a is b or (isinstance(a, (*_ATOMS, set, frozenset)) and bool(a == b))
