"""Who left and who waits: notes that ranks leave in the store when something has gone wrong.

gloo says that a connection broke or that time is up, but a ring passes a fault on, so that a rank
hears of it from its neighbour and not from the one who caused it. So whoever leaves writes down
why and through whose fault, before it cuts its connections; and whoever has waited for long writes
down how far it has come, so that the others see who is silent. While all is well nobody
writes before the end.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from tlsched.shim.store import StoreError, bounded

ANSWER_S = 2.0  # how long the store may take over notes
GRACE_S = 3.0  # how long others get to say that they wait too
_TEXT_LIMIT = 300

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Note:
    """Why a rank left, and the rank that it holds responsible (None: itself)."""

    why: str
    blamed: int | None


class Roster:
    """The ranks of one context. ``names[r]`` is what users call rank r of the group.

    ``started[lane]`` counts the collectives that this rank has started on a lane; ``blamed`` is the
    rank that was last found responsible for a failure.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int]) -> None:
        self.rank = rank
        self.names = tuple(names)
        self.started: list[int] = []
        self.blamed: int | None = None
        self._store = store
        self._store_gone = False
        self._others = [other for other in range(len(names)) if other != rank]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.names)

    def name(self, rank: int) -> str:
        """How to call ``rank`` in a message."""
        return f"rank {self.names[rank]}"

    def listed(self, ranks: Iterable[int]) -> str:
        """How to call ``ranks`` in a message."""
        names = [self.name(rank) for rank in ranks]
        return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)

    def leave(self, why: str) -> None:
        """Write down why this rank leaves. Never fails: the store may be gone as well."""
        self._write(f"left/{self.rank}", Note(why[:_TEXT_LIMIT], self.blamed))

    def still_waiting(self) -> None:
        """Write down how far this rank has come."""
        self._write(f"waits/{self.rank}", tuple(self.started))

    def note_of(self, rank: int) -> Note | None:
        """What ``rank`` wrote when it left. Blocks as the store does: see :func:`bounded`."""
        note: Note | None = self._read(f"left/{rank}")
        return note

    def who_broke(self, suspect: int | None, gone: Container[int] = ()) -> str:
        """Who is to blame for a broken connection to ``suspect``, in words.

        ``gone`` are the ranks whose connections are closed. Without the store nobody's note can be
        read; and if rank 0, which keeps it by default, has gone with it, it went first.
        """
        try:
            notes = self._ask(lambda _: self._notes(), ANSWER_S)
        except StoreError:
            notes = {}
            suspect = 0 if 0 in gone else suspect
        if suspect is None:
            suspect = min(notes, key=lambda rank: notes[rank].blamed is not None, default=None)
        if suspect is None:
            return "a rank left"
        self.blamed = culprit = _follow(suspect, notes, self.rank)
        if culprit in notes:
            return f"{self.name(culprit)} left: {notes[culprit].why}"
        if culprit != suspect:
            return notes[suspect].why
        return f"{self.name(culprit)} left (its process ended, or the connection to it was cut)"

    def who_is_silent(self, lane: int, timeout_s: float) -> str:
        """Who keeps this rank waiting for a collective of ``lane``, in words."""
        self.still_waiting()
        within = f"within {timeout_s:g} s"
        try:
            waits, notes = self._ask(self._answers, GRACE_S + ANSWER_S)
        except StoreError:
            self.blamed = 0 if self.rank else None
            return f"no answer {within}, nor from the store, which {self.name(0)} keeps by default"
        if notes:
            return self.who_broke(None)
        silent = [rank for rank in self._others if rank not in waits]
        behind = [rank for rank in waits if waits[rank][lane] < self.started[lane]]
        self.blamed = next(iter((*silent, *behind)), None)
        if silent:
            return f"{self.listed(silent)} did not answer {within}"
        if behind:
            return f"{self.listed(behind)} waits for an earlier average and had none {within}"
        return f"every rank waits, and the network carried nothing {within}"

    def _answers(self, given_up: threading.Event) -> tuple[dict[int, Any], dict[int, Note]]:
        end_s = time.monotonic() + GRACE_S
        waits: dict[int, Any] = {}
        while len(waits) < len(self._others) and time.monotonic() < end_s:
            if given_up.wait(0.05):
                break
            for rank in self._others:
                if rank not in waits and (counts := self._read(f"waits/{rank}")) is not None:
                    waits[rank] = counts
        return waits, self._notes()

    def _notes(self) -> dict[int, Note]:
        found = {rank: self.note_of(rank) for rank in self._others}
        return {rank: note for rank, note in found.items() if note is not None}

    def _read(self, key: str) -> Any:
        return pickle.loads(self._store.get(key)) if self._store.check([key]) else None

    def _ask(self, call: Callable[[threading.Event], T], limit_s: float) -> T:
        """As :func:`bounded`; a store that failed once is not asked again (torch logs each try)."""
        if self._store_gone:
            raise StoreError("the ranks' store has gone")
        try:
            return bounded(call, limit_s)
        except StoreError:
            self._store_gone = True
            raise

    def _write(self, key: str, value: object) -> None:
        raw = pickle.dumps(value)
        try:
            self._ask(lambda _: self._store.set(key, raw), ANSWER_S)  # type: ignore[arg-type]  # bytes work; the stub says str
        except StoreError:
            return


def _follow(suspect: int, notes: dict[int, Note], me: int) -> int:
    """From who broke the connection to who made him do it."""
    seen = {suspect}
    while (note := notes.get(suspect)) is not None and note.blamed is not None:
        if note.blamed in seen or note.blamed == me:
            break
        suspect = note.blamed
        seen.add(suspect)
    return suspect
