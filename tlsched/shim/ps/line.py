"""Line: one lane of one job on a server, where the segments of all workers meet.

All workers send the same segments in the same order, so a segment is known by its position. The
sum is made in the order of the ranks, whoever comes first, so it does not depend on timing, on
where a gradient is cut, nor on the number of servers.
"""

from __future__ import annotations

from collections import deque

from tlsched.shim.ps.adding import ITEM_BYTES, add
from tlsched.shim.ps.cutting import SEGMENT_BYTES
from tlsched.shim.ps.pool import Buffer, Pool
from tlsched.shim.ps.wire import Kind, Trouble, unpack

# How many segments a worker may be ahead of the slowest one, and how many sums may wait for the
# slowest reader: enough for what is under way between two hosts, and what bounds a server's memory.
WINDOW = 8


class Mismatch(Exception):
    """Workers of a job send different things: ``trouble`` says who and what."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.text)
        self.trouble = trouble


class Sum:
    """The segments of one position: those that are added already are in ``total``."""

    __slots__ = ("added", "code", "early", "first", "head", "hold", "length", "total")

    def __init__(self, head: bytes, rank: int) -> None:
        what = unpack(head)
        if what.kind != Kind.SEGMENT or what.code >= len(ITEM_BYTES):
            raise Mismatch(Trouble(f"sent a record that no worker sends ({what})", rank))
        if not 0 < what.length <= SEGMENT_BYTES or what.length % ITEM_BYTES[what.code]:
            raise Mismatch(Trouble(f"sent a segment of no length that is allowed ({what})", rank))
        self.head = head
        self.first = rank
        self.code, self.hold, self.length = what.code, bool(what.hold), what.length
        self.added = 0
        self.early: dict[int, Buffer] = {}
        self.total: Buffer | None = None


class Line:
    """Sums of ``workers`` workers. ``unsent`` counts sums that still leave, unless they were held.

    ``held`` are complete sums that wait for the end of what they are a part of.
    """

    def __init__(self, workers: int, pool: Pool) -> None:
        self.workers = workers
        self.unsent = 0
        self.held: list[Sum] = []
        self._pool = pool
        self._done = 0
        self._sums: deque[Sum] = deque()

    @property
    def done(self) -> int:
        """How many sums are complete: the position of the first that is not."""
        return self._done

    def open_for(self, position: int) -> bool:
        """Whether the segment at ``position`` may be received now."""
        return position < self._done + WINDOW and self.unsent < WINDOW

    def announce(self, rank: int, position: int, head: bytes) -> int:
        """``rank`` is about to send what ``head`` says; its length. Raises :class:`Mismatch`."""
        index = position - self._done
        if index == len(self._sums):
            self._sums.append(Sum(head, rank))
        found = self._sums[index]
        if found.head != head:
            raise Mismatch(
                Trouble(
                    f"sent {unpack(head)} where rank {found.first} sent {unpack(found.head)}",
                    rank,
                )
            )
        return found.length

    def arrive(self, rank: int, position: int, buffer: Buffer) -> list[Sum]:
        """``rank``'s segment at ``position`` is in ``buffer``: the sums that go back now."""
        found = self._sums[position - self._done]
        found.early[rank] = buffer
        while (part := found.early.pop(found.added, None)) is not None:
            found.added += 1
            if found.total is None:
                found.total = part
                continue
            length = found.length
            add(found.total.bytes[:length], part.bytes[:length], found.code)
            self._pool.give(part)
        if found.added < self.workers:
            return []
        # The workers' segments come in order, so the first sum is the first to be complete.
        assert found is self._sums[0]
        self._sums.popleft()
        self._done += 1
        self.held.append(found)
        if found.hold:
            return []
        ready, self.held = self.held, []
        return ready
