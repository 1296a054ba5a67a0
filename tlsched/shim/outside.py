"""Reads of the parameters from outside any forward, where no guard stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch.nn import Module
from torch.optim import Optimizer

from tlsched.errors import TrainingError
from tlsched.shim.bucket import Bucket


class Training(Protocol):
    """The engine, as seen from here."""

    model: Module

    @property
    def learning(self) -> bool:
        """Whether all is synchronous still."""

    @property
    def before_forward(self) -> bool:
        """Whether step() was called and no forward has read anything since."""

    @property
    def due(self) -> Iterable[Bucket]:
        """The buckets on which updates are due."""

    def steps_with(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` is one of this context's."""

    def flush(self) -> None:
        """Do the updates that are due."""


class OutsideReads:
    """Does the updates that are due before somebody reads (see :class:`reads.Watching`).

    ``strict`` raises instead where nobody read while tlsched learned; ``late`` counts, by name.
    """

    def __init__(self, training: Training, say: Callable[[str], None], *, strict: bool) -> None:
        self.model = training.model
        self.late: dict[str, int] = {}
        self._training = training
        self._say = say
        self._strict = strict
        self._walked = False

    def settle_updates(self) -> None:
        """See :class:`tlsched.shim.reads.Watching`."""
        if any(self._training.due):
            self._training.flush()

    def steps_with(self, optimizer: Optimizer) -> bool:
        """See :class:`tlsched.shim.reads.Watching`."""
        return self._training.steps_with(optimizer)

    def enter_compiled(self) -> None:
        """See :class:`tlsched.shim.reads.Watching`."""
        if any(self._training.due):
            self._say(
                "a compiled function waits for every update; give schedule() the compiled module "
                "to wait for its own parameters only"
            )
            self._training.flush()

    def walk_parameters(self) -> None:
        """See :class:`tlsched.shim.reads.Watching`."""
        if self._training.learning:
            self._walked = self._walked or self._training.before_forward
            return
        first = next(iter(self._training.due), None)
        if first is None:
            return
        if not self._walked:
            self.read_late(first.names[0], count=False)
        self._say(
            "model.parameters() between step() and forward waits for every update; use "
            "optimizer.zero_grad() to clear gradients"
        )
        self._training.flush()

    def read_late(self, name: str, *, count: bool = True) -> None:
        """``name`` is read where no guard stands; raises when strict."""
        if self._strict:
            raise TrainingError(
                f"{name} is read where tlsched never saw it read while it learned, and its update "
                "is still due",
                hint="call run.flush() before this read, or leave strict out: the read then waits",
            )
        if count:
            self.late[name] = self.late.get(name, 0) + 1
