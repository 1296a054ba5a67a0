"""Whether an optimizer can update some parameters now and others later, and how it does it.

torch's own optimizers treat each parameter for itself. A foreign one may not: it may count its
steps, scale by a norm over all parameters or draw random numbers. So each of its first steps is
done twice, in parts and as a whole, and unless both end with the same bits it is never split.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from tlsched.errors import ModelRefused

# One group of an optimizer: its hyper-parameters, and its parameters.
Group = dict[str, Any]
# The parameters of one bucket, with the number of their group.
Part = Sequence[tuple[int, Parameter]]

TRIES = 2
_NOT_SETTINGS = ("params", "state", "param_groups")


class Separability:
    """What is known of ``optimizer``: ``unknown`` until it was tried, ``why_whole`` if it must not.

    Raises ModelRefused for an optimizer that cannot be used at all.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        refuse_unsuitable(optimizer)
        self._optimizer = optimizer
        self.why_whole: str | None = None
        module = getattr(type(optimizer).step, "__module__", "")
        self.foreign = not module.startswith("torch.optim.")
        self._tries_left = TRIES if self.foreign else 0
        if module.startswith("torch.distributed."):
            self.why_whole = f"{type(optimizer).__name__} communicates in step()"

    @property
    def unknown(self) -> bool:
        """Whether the next step should be tried."""
        return self._tries_left > 0 and self.why_whole is None

    def step_both_ways(self, parts: Sequence[Part]) -> None:
        """Step on each of ``parts`` alone, undo that, step on all, which counts, and compare."""
        self._tries_left -= 1
        name = type(self._optimizer).__name__
        before = _Record(self._optimizer)
        alone: list[torch.Tensor] | None = None
        try:
            alone = self._step_alone(parts)
        except Exception as error:
            kind = type(error).__name__
            self.why_whole = f"{name} cannot step on a part of its parameters ({kind})"
        before.restore()
        run_part(self._optimizer, None)
        if alone is not None:
            self.why_whole = self._difference(before, [p for part in parts for _, p in part], alone)

    def _step_alone(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """What each parameter is after a step on its part alone; all is left as it was."""
        groups = [hyperparameters(group) for group in self._optimizer.param_groups]
        alone = []
        optimizer = snapshot(self._optimizer)
        for members in parts:
            with _undone(self._optimizer, [p for _, p in members]) as values:
                run_part(optimizer, _grouped(groups, members))
            alone += values
        return alone

    def _difference(
        self, before: _Record, parameters: Sequence[Parameter], alone: Sequence[torch.Tensor]
    ) -> str | None:
        name = type(self._optimizer).__name__
        changed = before.changed()
        if any(not isinstance(key, torch.Tensor) for key in self._optimizer.state):
            return f"{name} keeps state that belongs to no parameter"
        if changed is not None:
            return f"{name} changes {changed} in step()"
        if not all(torch.equal(p.detach(), v) for p, v in zip(parameters, alone, strict=True)):
            return f"{name}'s update of a parameter depends on other parameters"
        return None


@contextlib.contextmanager
def _undone(optimizer: Optimizer, parameters: Sequence[Parameter]) -> Iterator[list[torch.Tensor]]:
    """Put ``parameters``, their gradients and their state back afterwards.

    Yields tensors that will hold what the parameters were until then.
    """
    values = [p.detach().clone() for p in parameters]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    state = {p: copy.deepcopy(optimizer.state[p]) for p in parameters if p in optimizer.state}
    keys = set(optimizer.state)
    try:
        yield values
    finally:
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            _swap(parameter.detach(), value)
            if gradient is not None and parameter.grad is not None:
                parameter.grad.copy_(gradient)
        for key in set(optimizer.state) - keys:
            del optimizer.state[key]
        for parameter, old in state.items():
            optimizer.state[parameter] = old


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the values piece by piece: a third copy of a large parameter may not fit."""
    pieces = zip(one.chunk(16), other.chunk(16), strict=True) if one.dim() else [(one, other)]
    for first, second in pieces:
        held = first.clone()
        first.copy_(second)
        second.copy_(held)


class _Record:
    """Copies of what a step may change besides parameters, their gradients and their state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [_settings(group) for group in optimizer.param_groups]
        self._own = _settings(optimizer.__dict__)
        self._random = torch.get_rng_state()

    def restore(self) -> None:
        """Put everything back."""
        optimizer = self._optimizer
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            for key in [k for k in group if k not in settings and k not in _NOT_SETTINGS]:
                del group[key]
            group.update(copy.deepcopy(settings))
        for key in _settings(optimizer.__dict__).keys() - self._own.keys():
            del optimizer.__dict__[key]
        optimizer.__dict__.update(_settings(self._own))
        torch.set_rng_state(self._random)

    def changed(self) -> str | None:
        """What is no longer as it was."""
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            now = _settings(group)
            for key in now:
                if key not in settings or not _same(now[key], settings[key]):
                    return f"its setting {key!r}"
        now = _settings(self._optimizer.__dict__)
        for key in now:
            if key not in self._own or not _same(now[key], self._own[key]):
                return f"its attribute {key!r}"
        if not torch.equal(torch.get_rng_state(), self._random):
            return "the random generator's state"
        return None


def refuse_unsuitable(optimizer: Optimizer) -> None:
    """Raise ModelRefused for an optimizer that needs all parameters at once."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelRefused(
            "LBFGS evaluates the loss several times a step over all parameters at once",
            hint="use another optimizer, or DistributedDataParallel",
        )


def hyperparameters(group: Group) -> Group:
    """The group's settings as they are now; what may change in place is copied."""
    return {
        key: value.clone()
        if isinstance(value, torch.Tensor)
        else copy.copy(value)
        if isinstance(value, (list, dict))
        else value
        for key, value in group.items()
        if key != "params"
    }


def snapshot(optimizer: Optimizer) -> Optimizer:
    """A shallow copy of ``optimizer`` as it is now, which shares its state."""
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    return part


def run_part(part: Optimizer, groups: list[Group] | None) -> None:
    """The class's own step() on ``groups`` (None: all). Hooks run once a step, so not here."""
    if groups is not None:
        part.param_groups = groups
    step = type(part).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps
    step(part)


def _grouped(groups: Sequence[Group], members: Part) -> list[Group]:
    by_group: dict[int, list[Parameter]] = {}
    for number, parameter in members:
        by_group.setdefault(number, []).append(parameter)
    return [groups[number] | {"params": them} for number, them in by_group.items()]


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of what can be compared; objects of other kinds (hooks, functions) stay out."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in values.items()
        if key not in _NOT_SETTINGS
        and isinstance(value, (int, float, complex, str, tuple, list, torch.Tensor, type(None)))
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)
