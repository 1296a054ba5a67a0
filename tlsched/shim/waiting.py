"""Where forward waits: before each module that reads parameters, for their buckets only."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from tlsched.shim import compiled, learning
from tlsched.shim.bucket import Bucket
from tlsched.shim.gradients import Gradients
from tlsched.shim.guards import Readers, guard_modules
from tlsched.shim.trace import Trace


class Waits:
    """Guards on the modules of ``model``. ``trace`` tells where times are noted just now."""

    def __init__(self, model: Module, trace: Callable[[], Trace | None]) -> None:
        self._model = model
        self._trace = trace
        self._guards: list[RemovableHandle | compiled.Boundary] = []

    def place(self, watched: Readers, gradients: Gradients) -> list[Bucket]:
        """Guard as was learned; returns the buckets that no guard is for but step() itself."""
        self.remove()
        needs, outside = learning.needs(self._model, watched, gradients)
        self._guards = [
            *guard_modules(self._model, needs, self._wait_for),
            *compiled.guard(self._model, needs, self._wait_for),
        ]
        return outside

    def remove(self) -> None:
        """Take the guards away."""
        for guard in self._guards:
            guard.remove()
        self._guards = []

    def _wait_for(self, buckets: tuple[Bucket, ...]) -> None:
        trace = self._trace()
        for bucket in buckets:
            if trace is not None:
                trace.needed(bucket.index)
            if bucket.pending:
                before_s = bucket.waited_s
                bucket.settle()
                if trace is not None:
                    trace.waited(bucket.waited_s - before_s)
