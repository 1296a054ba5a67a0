"""What all ranks must agree on, over the process group's key-value store.

The store and not a collective, because a store can say which rank did not answer.
"""

from __future__ import annotations

import datetime
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn import Module

from tlsched.errors import CommunicationError, RanksDisagree

T = TypeVar("T")


class Agreement:
    """A meeting of all ranks of ``group``; every rank must make the same calls in the same order.

    Each context of a process gets keys of its own, since nobody ever clears the store.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.timeout_s = timeout_s
        whole: Store = group.get_group_store()
        number = whole.add(f"tlsched/contexts/{self.rank}", 1)
        self._store = PrefixStore(f"tlsched/{number}", whole)
        self._calls = 0

    def substore(self, name: str) -> Store:
        """Keys of their own for ``name``: a lane's group meets there."""
        return PrefixStore(name, self._store)

    def gather(self, what: str, value: T) -> list[T]:
        """``value`` of every rank, by rank. ``what`` names it in the error when one is missing."""
        key = self._next_key()
        self._set(f"{key}/{self.rank}", value)
        return [self._get(f"{key}/{rank}", rank, what) for rank in range(self.size)]

    def from_rank_0(self, what: str, value: T) -> T:
        """Rank 0's ``value``, on every rank."""
        key = self._next_key()
        if self.rank == 0:
            self._set(f"{key}/0", value)
        return cast("T", self._get(f"{key}/0", 0, what))

    def require_same(self, what: str, lines: Sequence[str]) -> None:
        """Raise RanksDisagree naming the first of ``lines`` that differs from rank 0's."""
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        if len(set(self.gather(what, digest))) == 1:
            return
        everyone = self.gather(what, list(lines))
        for rank, theirs in enumerate(everyone):
            for number in range(max(len(everyone[0]), len(theirs))):
                ours, other = _line(everyone[0], number), _line(theirs, number)
                if ours != other:
                    raise RanksDisagree(
                        f"ranks disagree on the {what}: rank 0 has {ours}, rank {rank} has {other}",
                        hint="build the same model, optimizer and settings on every rank",
                    )

    def _next_key(self) -> str:
        self._calls += 1
        return str(self._calls)

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes work; the stub says str

    def _get(self, key: str, rank: int, what: str) -> Any:
        try:
            self._store.wait([key], datetime.timedelta(seconds=self.timeout_s))
            return pickle.loads(self._store.get(key))
        except (dist.DistError, RuntimeError) as error:
            raise CommunicationError(
                f"rank {rank} did not tell its {what} within {self.timeout_s:g} s",
                hint="see that rank's own error; every rank must enter the context",
            ) from error


def model_signature(model: Module) -> list[str]:
    """One line for each parameter and buffer: name, shape, strides, dtype, if it is trained."""
    return [
        f"{name} {tuple(tensor.shape)} strides {tensor.stride()} {tensor.dtype}"
        f"{' trained' if tensor.requires_grad else ''}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


def _line(lines: Sequence[str], number: int) -> str:
    return lines[number] if number < len(lines) else "nothing"
