"""A bucket: one flat buffer that holds the gradients of a few parameters, and what is due on it.

A bucket goes round: backward fills it, its all-reduce runs, and step() may leave an update due on
it, which :meth:`Bucket.settle` carries out as soon as somebody needs the parameters. The values
live here only: ``p.grad`` is a promise over the bucket's memory.

Behind the gradients lie one flag a parameter, 1 where this rank's backward produced a gradient.
They are summed with the gradients, so that every rank learns at no cost which parameters were used
by somebody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter

from tlsched.shim.promise import Promise
from tlsched.shim.reduction import Reduction

# Buckets' gradients start at multiples of this many elements, so that vector loads are aligned.
ALIGN_ELEMENTS = 16


class Bucket:
    """The gradients of ``parameters`` (one dtype, one device), and their promises.

    ``wait`` turns a running all-reduce into a result or an error that names this bucket.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        parameters: Sequence[Parameter],
        world_size: int,
        wait: Callable[[Bucket, Reduction], None],
    ) -> None:
        self.index = index
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.waited_s = 0.0
        self.work: Reduction | None = None
        self.updates: list[Callable[[], None]] = []
        self.lane = 0
        self._wait = wait
        self._scale = 1.0 / world_size
        self._settling = False
        offsets, length = _offsets([p.numel() for p in parameters])
        first = parameters[0]
        self.flat = torch.zeros(length + len(parameters), dtype=first.dtype, device=first.device)
        self.views = tuple(
            _view_like(self.flat, offset, p) for offset, p in zip(offsets, parameters, strict=True)
        )
        self.flags = self.flat[length:]
        self.promises = tuple(Promise(view, self, i) for i, view in enumerate(self.views))
        self.filled = [False] * len(parameters)
        self.missing = len(parameters)
        self.launched = False
        self._zero_after_update: set[int] = set()

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

    def launch(self, start: Callable[[torch.Tensor], Reduction]) -> None:
        """Start the all-reduce. All parameters must have been filled."""
        self.flags.copy_(torch.tensor(self.filled))
        self.launched = True
        self.work = start(self.flat)

    def reset(self) -> None:
        """A new round begins: settle what is pending, then let backward fill the bucket."""
        self.settle()
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

    def zero_later(self, index: int) -> bool:
        """See :class:`tlsched.shim.promise.Settles`: zero_grad() must not wait for the update."""
        if not self.updates or self._settling:
            return False
        self._zero_after_update.add(index)
        return True

    def release(self) -> None:
        """Leave ordinary gradients behind: views of this bucket's memory instead of promises."""
        for parameter, view, promise in zip(
            self.parameters, self.views, self.promises, strict=True
        ):
            if parameter.grad is promise:
                parameter.grad = view

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
        updates, self.updates = self.updates, []
        for update in updates:
            update()
        for index in self._zero_after_update:
            self.views[index].zero_()
        self._zero_after_update.clear()


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned start of each block of ``sizes`` elements, and the length of them all."""
    offsets, length = [], 0
    for size in sizes:
        offsets.append(length)
        length += -(-size // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    return offsets, length


def _view_like(flat: torch.Tensor, offset: int, parameter: Parameter) -> torch.Tensor:
    """The block of ``flat`` at ``offset`` in the parameter's shape, and its strides if dense.

    Autograd keeps a gradient's layout only where it equals the parameter's (channels_last).
    """
    block = flat[offset : offset + parameter.numel()]
    if is_dense(parameter):
        return block.as_strided(parameter.size(), parameter.stride(), offset)
    return block.view(parameter.size())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill its memory without gap or overlap, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
