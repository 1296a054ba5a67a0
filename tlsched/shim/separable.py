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
from tlsched.shim.belongings import Belongings, why_not_tried

# One group of an optimizer: its hyper-parameters, and its parameters.
Group = dict[str, Any]
# The parameters of one bucket, with the number of their group.
Part = Sequence[tuple[int, Parameter]]

TRIES = 2


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
        """Step on each of ``parts`` alone, undo that, step on all, which counts, and compare.

        An optimizer whose trial could not be undone only steps on all.
        """
        self._tries_left -= 1
        self.why_whole = why_not_tried(self._optimizer)
        if self.why_whole is not None:
            run_part(self._optimizer, None)
            return
        before = Belongings(self._optimizer)
        alone: list[torch.Tensor] = []
        try:
            alone = self._step_alone(parts)
        except Exception as error:
            name, kind = type(self._optimizer).__name__, type(error).__name__
            self.why_whole = f"{name} cannot step on a part of its parameters ({kind})"
        before.restore()
        run_part(self._optimizer, None)
        if self.why_whole is None:
            self.why_whole = self._difference(before, [p for part in parts for _, p in part], alone)

    def _step_alone(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """What each parameter is after a step on its part alone; all is left as it was.

        While the first part steps, which no copy of the others stands beside yet, they are copied:
        an optimizer that reaches past its groups is found before it does harm.
        """
        groups = [hyperparameters(group) for group in self._optimizer.param_groups]
        alone: list[torch.Tensor] = []
        optimizer = snapshot(self._optimizer)
        for members in parts:
            mine = {p for _, p in members}
            others = [] if alone else [p for part in parts for _, p in part if p not in mine]
            with _kept(others) as reached, _undone(self._optimizer, [p for _, p in members]) as out:
                run_part(optimizer, _grouped(groups, members))
            if reached:
                name = type(self._optimizer).__name__
                self.why_whole = f"{name} steps on parameters that are not in its groups"
                break
            alone += out
        return alone

    def _difference(
        self, before: Belongings, parameters: Sequence[Parameter], alone: Sequence[torch.Tensor]
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
def _kept(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Put ``parameters`` back afterwards. Yields a list that will hold those that had changed."""
    before = [(p, p._version, p.detach().clone()) for p in parameters]
    changed: list[Parameter] = []
    try:
        yield changed
    finally:
        for parameter, version, value in before:
            if parameter._version != version or not torch.equal(parameter.detach(), value):
                parameter.detach().copy_(value)
                changed.append(parameter)


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
