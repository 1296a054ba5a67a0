"""What all ranks must agree on, over the process group's key-value store.

The store and not a collective, because a store can say which rank did not answer.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn import Module

from tlsched.errors import CommunicationError, RanksDisagree
from tlsched.shim.roster import Roster
from tlsched.shim.store import StoreError, bounded

T = TypeVar("T")

_LONGEST_PAUSE_S = 0.1
_ANSWER_S = 5.0  # how much longer than the timeout the store itself may take


class Agreement:
    """A meeting of all ranks of ``group``; every rank must make the same calls in the same order.

    Each context of a process gets keys of its own, since nobody ever clears the store. ``roster``
    tells who left and who waits. With ``size`` only the first so many ranks meet.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout_s: float, *, size: int | None = None
    ) -> None:
        self.rank = group.rank()
        self.size = size or group.size()
        self.timeout_s = timeout_s
        whole: Store = group.get_group_store()
        number = self._call(lambda _: whole.add(f"tlsched/contexts/{self.rank}", 1))
        self._store = PrefixStore(f"tlsched/{number}", whole)
        self._calls = 0
        names = dist.get_process_group_ranks(group)[: self.size]
        self.roster = Roster(self.substore("roster"), self.rank, names)

    def substore(self, name: str) -> Store:
        """Keys of their own for ``name``: a lane's group meets there."""
        return PrefixStore(name, self._store)

    def gather(self, what: str, value: T) -> list[T]:
        """``value`` of every rank, by rank. ``what`` names it in the error when one is missing."""
        values = self._meet(what, range(self.size), value)
        return [cast("T", values[rank]) for rank in range(self.size)]

    def from_rank_0(self, what: str, value: T) -> T:
        """Rank 0's ``value``, on every rank."""
        return cast("T", self._meet(what, (0,), value)[0])

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
                        f"ranks disagree on the {what}: {self.roster.name(0)} has {ours}, "
                        f"{self.roster.name(rank)} has {other}",
                        hint="build the same model, optimizer and settings on every rank",
                    )

    def _meet(self, what: str, ranks: Sequence[int], value: object) -> dict[int, Any]:
        """Tell ``value`` if this rank is one of ``ranks``, and learn theirs."""
        self._calls += 1
        keys = {rank: f"{self._calls}/{rank}" for rank in ranks}
        raw = pickle.dumps(value) if self.rank in keys else None

        def meet(given_up: threading.Event) -> dict[int, Any]:
            if raw is not None:
                self._store.set(keys[self.rank], raw)  # type: ignore[arg-type]  # bytes work; the stub says str
            return self._collect(what, keys, given_up)

        return self._call(meet)

    def _call(self, call: Callable[[threading.Event], T]) -> T:
        try:
            return bounded(call, self.timeout_s + _ANSWER_S)
        except StoreError as error:
            raise CommunicationError(
                str(error),
                hint="see rank 0's own error: by default its process keeps the store",
            ) from error

    def _collect(
        self, what: str, keys: Mapping[int, str], given_up: threading.Event
    ) -> dict[int, Any]:
        """The values at ``keys``, in a thread that stops asking when ``given_up``."""
        found: dict[int, Any] = {}
        missing = list(keys)
        end_s = time.monotonic() + self.timeout_s
        pause_s = 0.001
        while True:
            while missing and self._store.check([keys[missing[0]]]):
                rank = missing.pop(0)
                found[rank] = pickle.loads(self._store.get(keys[rank]))
            if not missing or given_up.wait(pause_s):
                return found
            late = time.monotonic() > end_s
            if late or pause_s >= _LONGEST_PAUSE_S:
                silent = [rank for rank in missing if not self._store.check([keys[rank]])]
                self._raise_if_left(what, silent)
                if silent and late:
                    self._raise_silent(what, silent)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _raise_if_left(self, what: str, silent: Sequence[int]) -> None:
        for rank in silent:
            note = self.roster.note_of(rank)
            if note is not None:
                self.roster.blamed = rank if note.blamed is None else note.blamed
                raise CommunicationError(
                    f"{self.roster.name(rank)} left before it told its {what}: {note.why}",
                    hint="see that rank's own error",
                )

    def _raise_silent(self, what: str, silent: Sequence[int]) -> None:
        self.roster.blamed = silent[0]
        raise CommunicationError(
            f"{self.roster.listed(silent)} did not tell the {what} within {self.timeout_s:g} s",
            hint="see that rank's own error; every rank must enter the context",
        )


def model_signature(model: Module) -> list[str]:
    """One line for each parameter and buffer: name, shape, strides, dtype, if it is trained."""
    return [
        f"{name} {tuple(tensor.shape)} strides {tensor.stride()} {tensor.dtype}"
        f"{' trained' if tensor.requires_grad else ''}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


def _line(lines: Sequence[str], number: int) -> str:
    return lines[number] if number < len(lines) else "nothing"
