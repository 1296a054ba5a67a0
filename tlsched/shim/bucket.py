"""A bucket: the gradients of a few parameters in one flat buffer, and what is due on them.

A bucket goes round: backward fills it, its all-reduce runs, and step() may leave an update due on
it, which :meth:`Bucket.settle` carries out as soon as somebody needs the parameters. The values
live in its :class:`~tlsched.shim.memory.Memory` only: ``p.grad`` is a promise over it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import Parameter

from tlsched.shim import pending
from tlsched.shim.memory import Memory, undisturbed
from tlsched.shim.promise import Promise, Settled
from tlsched.shim.reduction import Running


class Bucket:
    """The gradients of ``parameters`` (one dtype, one device), and their promises.

    It does nothing before :meth:`serve`. ``at_once`` counts for each reason how often the update
    was not left due; ``torn`` tells that an update ended half-way.
    """

    index: int
    lane: int
    waited_s: float
    at_once: dict[str, int]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]
    flags: torch.Tensor
    promises: tuple[Promise, ...]
    _wait: Callable[[Bucket, Running], None]
    _on_late_read: Callable[[str], None]

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Parameter], world_size: int
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.work: Running | None = None
        self.updates: list[Callable[[], object]] = []
        self.due: list[Parameter] = []
        self.torn = False
        self._scale = 1.0 / world_size
        self._settling = False
        self._memory = Memory(self.parameters)
        self._take_memory()
        self.promises = tuple(Promise(view, self, i) for i, view in enumerate(self.views))
        self._own_references = _references(self.promises), _references(self.views)
        self.filled = [False] * len(parameters)
        self.missing = len(parameters)
        self.launched = False

    def serve(
        self,
        index: int,
        lane: int,
        wait: Callable[[Bucket, Running], None],
        on_late_read: Callable[[str], None],
    ) -> None:
        """Be bucket ``index`` of a plan, on ``lane``; counts begin anew.

        ``wait`` turns a running all-reduce into a result or an error that names this bucket;
        ``on_late_read`` hears of a parameter that is read while its update is due, where no guard
        stands, and may raise.
        """
        self.index, self.lane = index, lane
        self._wait, self._on_late_read = wait, on_late_read
        self.waited_s = 0.0
        self.at_once = {}

    def adopt(self, released: dict[Parameter, torch.Tensor]) -> None:
        """Take out of ``released`` what it holds for this bucket, and into this bucket's memory.

        ``released`` is what :meth:`release` returned. A gradient that is no longer its parameter's
        is only taken out.
        """
        for parameter, view, promise in zip(
            self.parameters, self.views, self.promises, strict=True
        ):
            gradient = released.pop(parameter, None)
            if gradient is not None and parameter.grad is gradient:
                view.copy_(gradient)
                parameter.grad = promise

    def fill(self, index: int) -> bool:
        """Take over the gradient that backward left in parameter ``index``; True when complete.

        The gradient is divided by the number of ranks on the way in, as DistributedDataParallel
        does, so that the sum cannot overflow where the average does not.
        """
        if not self.filled[index]:
            self._take(index)
            self.filled[index] = True
            self.missing -= 1
        return self.missing == 0

    def fill_rest(self) -> None:
        """Account for the parameters that backward did not reach: what they hold, or zeros."""
        for index, parameter in enumerate(self.parameters):
            if self.filled[index]:
                continue
            if parameter.grad is None:
                self.views[index].zero_()
            else:
                self._take(index)
                self.filled[index] = True

    def launch(self, start: Callable[[torch.Tensor], Running]) -> None:
        """Start the all-reduce. All parameters must have been filled."""
        if all(self.filled):
            self.flags.fill_(1)
        else:
            self.flags.copy_(torch.tensor(self.filled))
        self.launched = True
        self.work = start(self._memory.wire)

    def reset(self) -> None:
        """A new round begins: settle what is pending, then let backward fill the bucket."""
        self.settle()
        if self._memory.shared or self._kept_by_others():
            self._leave_memory()
        self.filled = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.launched = False

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """Autograd adds ``gradient`` to ``p.grad`` (see :class:`tlsched.shim.promise.Settles`)."""
        if self.filled[index] and not self.launched:  # what is there is divided already
            self.views[index].add_(gradient, alpha=self._scale)
        else:
            self.settle()
            self.views[index].add_(gradient)

    @property
    def bytes(self) -> int:
        """What its all-reduce sums."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def kind(self) -> str:
        """What the members of a bucket must share."""
        return f"{self.flat.dtype} on {self.flat.device}"

    @property
    def everywhere_used(self) -> bool:
        """Whether this rank produced a gradient for each parameter in the last backward."""
        return all(self.filled)

    @property
    def pending(self) -> bool:
        """Whether :meth:`settle` has something to do."""
        return self.work is not None or bool(self.updates)

    def settle(self) -> None:
        """Wait for the all-reduce, then do the updates that step() left due. Idempotent."""
        if self._settling or not self.pending:
            return
        self._settling = True  # an update reads p.grad, which would settle again
        try:
            self._finish_reduction()
            self._finish_updates()
        finally:
            self._settling = False

    def leave_due(self, update: Callable[[], object], parameters: Iterable[Parameter]) -> None:
        """``update`` changes ``parameters``; do it when somebody needs them."""
        self.updates.append(update)
        for parameter in parameters:
            self.due.append(parameter)
            pending.mark(parameter, self)

    def read_late(self, parameter: Parameter) -> None:
        """See :class:`tlsched.shim.pending.Owner`."""
        for name, own in zip(self.names, self.parameters, strict=True):
            if own is parameter:
                self._on_late_read(name)
        self.settle()

    def zero_later(self, index: int) -> bool:
        """See :class:`tlsched.shim.promise.Settles`: zero_grad() must not wait for the update."""
        if not self.updates or self._settling:
            return False
        self.updates.append(self.views[index].zero_)
        return True

    def drop_updates(self) -> None:
        """Forget the updates that are due."""
        self.updates.clear()
        self._unmark()

    def release(self) -> dict[Parameter, torch.Tensor]:
        """Leave ordinary gradients behind: views of this bucket's memory instead of promises.

        Returns them. The bucket is of no use afterwards and holds no memory. Promises that somebody
        keeps go on standing for their gradients, and may become ``p.grad`` once more.
        """
        self._unmark()
        self.work = None  # a process group lives as long as a work of it
        left = {}
        for parameter, view, promise in zip(
            self.parameters, self.views, self.promises, strict=True
        ):
            if parameter.grad is promise:
                parameter.grad = left[parameter] = view
            promise.owner_ = Settled(view)
        self.views = self.promises = ()
        del self._memory, self.flat, self.flags
        return left

    def _take_memory(self) -> None:
        self.flat, self.views = self._memory.flat, self._memory.views
        self.flags = self._memory.flags

    def _kept_by_others(self) -> bool:
        """Whether somebody keeps a gradient that is no longer its parameter's."""
        promises, views = _references(self.promises), _references(self.views)
        return (promises, views) != self._own_references and any(
            (
                promises[index] > self._own_references[0][index]
                or views[index] > self._own_references[1][index]
            )
            and parameter.grad is not self.promises[index]
            for index, parameter in enumerate(self.parameters)
        )

    def _leave_memory(self) -> None:
        """Leave the memory to those who keep old gradients, as a new p.grad would, and take new."""
        old, self._memory = self._memory, Memory(self.parameters)
        self._take_memory()
        promises = []
        for index, (parameter, promise) in enumerate(
            zip(self.parameters, self.promises, strict=True)
        ):
            if parameter.grad is promise:  # it is accumulated into
                self.views[index].copy_(old.views[index])
                promise.view_ = self.views[index]
                promises.append(promise)
            else:
                promise.owner_ = Settled(promise.view_)
                promises.append(Promise(self.views[index], self, index))
        self.promises = tuple(promises)

    def _take(self, index: int) -> None:
        parameter, view, promise = self.parameters[index], self.views[index], self.promises[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient is promise:
            view.mul_(self._scale)
        else:
            torch.mul(gradient.detach(), self._scale, out=view)
            parameter.grad = promise

    def _finish_reduction(self) -> None:
        if self.work is None:
            return
        started_s = time.perf_counter()
        self._wait(self, self.work)
        self.work = None  # not before: after a failure or Ctrl-C there is no average to use
        self.waited_s += time.perf_counter() - started_s
        if self.everywhere_used:
            return
        for index, used in enumerate((self.flags != 0).tolist()):
            if used and not self.filled[index]:
                self.parameters[index].grad = self.promises[index]

    def _finish_updates(self) -> None:
        self._unmark()
        if not self.updates:
            return
        updates, self.updates = self.updates, []
        self.torn = True  # until all are done: an update that is cut short cannot be repeated
        with undisturbed():
            for update in updates:
                update()
        self.torn = False

    def _unmark(self) -> None:
        for parameter in self.due:
            pending.unmark(parameter)
        self.due.clear()


def _references(values: tuple[object, ...]) -> list[int]:
    """How many hold each of ``values``, the tuple and this call included."""
    return [sys.getrefcount(value) for value in values]
