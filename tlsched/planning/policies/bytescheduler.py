"""bytescheduler: pieces of buckets, the most urgent first, under a window of credit.

After ByteScheduler (SOSP 2019, doi 10.1145/3341301.3359642), its section 4: tensors are cut into
partitions, a queue orders them by need, and what is on its way may not exceed the credit, which
returns when a piece has arrived. For all-reduce the order has to be one on all ranks: rank 0's
(:class:`ByteScheduler`) decides and the others (:class:`Following`) do as it did.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from tlsched.planning.plan import Plan, single_lane
from tlsched.planning.policies.base import PIECES_LANE, Policy, Send
from tlsched.planning.policies.settings import ALIGN_BYTES, PolicySettings, Window


def bytescheduler(plan: Plan, settings: PolicySettings) -> ByteScheduler:
    """The policy ``bytescheduler`` for ``plan``, as rank 0 runs it."""
    return ByteScheduler(plan, settings.window or Window())


def cut(plan: Plan, bucket: int, partition_bytes: int) -> list[Send]:
    """``bucket`` in pieces of at most ``partition_bytes``, rounded down to whole elements."""
    step = partition_bytes // ALIGN_BYTES * ALIGN_BYTES
    starts = range(0, max(plan.buckets[bucket].bytes, 1), step)
    return [
        Send(bucket, PIECES_LANE, start, None if start == starts[-1] else start + step)
        for start in starts
    ]


class ByteScheduler(Policy):
    """Rank 0's: hands over the most urgent pieces while there is credit.

    A piece that is larger than the whole window goes alone.
    """

    pieces = True
    dictated = True

    def __init__(self, plan: Plan, window: Window) -> None:
        self.window = window
        self._next = window
        super().__init__(
            single_lane(plan, PIECES_LANE), barrier=False, marked=False, lane_count=PIECES_LANE + 1
        )

    def use(self, window: Window) -> None:
        """Work with ``window`` from the next round on."""
        self._next = window

    def start_round(self) -> None:
        """See :class:`Policy`."""
        self.window = self._next
        self._urgent: list[int] = []
        self._pieces: dict[int, deque[Send]] = {}
        self._on_its_way = 0

    def complete(self, bucket: int) -> list[Send]:
        """See :class:`Policy`."""
        self._pieces[bucket] = deque(cut(self.plan, bucket, self.window.partition_bytes))
        heapq.heappush(self._urgent, bucket)
        return self._hand_over()

    def sent(self, send: Send) -> list[Send]:
        """See :class:`Policy`. The credit returns."""
        self._on_its_way -= self._size(send)
        return self._hand_over()

    def _hand_over(self) -> list[Send]:
        sends: list[Send] = []
        while self._urgent:
            pieces = self._pieces[self._urgent[0]]
            size = self._size(pieces[0])
            if self._on_its_way and self._on_its_way + size > self.window.credit_bytes:
                break
            self._on_its_way += size
            sends.append(pieces.popleft())
            if not pieces:
                heapq.heappop(self._urgent)
        return sends

    def _size(self, send: Send) -> int:
        stop = self.plan.buckets[send.bucket].bytes if send.stop is None else send.stop
        return max(stop - send.start, 1)


class Following(Policy):
    """The other ranks': hands over what rank 0 has handed over, in its order, and nothing else.

    What rank 0 has sent and is not complete here holds back what comes after it. The window is
    rank 0's too: whoever does as it does has as much on its way.
    """

    pieces = True
    dictated = True

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            single_lane(plan, PIECES_LANE), barrier=False, marked=False, lane_count=PIECES_LANE + 1
        )

    def start_round(self) -> None:
        """See :class:`Policy`."""
        self._orders: deque[Send] = deque()
        self._pieces: dict[int, deque[Send]] = {}
        self._complete = set()
        self._untold = len(self.plan.buckets)

    @property
    def told_all(self) -> bool:
        """Whether rank 0 has handed over everything of this round."""
        return self._untold == 0

    def told(self, partition_bytes: int, buckets: Iterable[int]) -> list[Send]:
        """Rank 0 has handed over the next piece of each of ``buckets``.

        It cuts by ``partition_bytes``, which is the same for a whole round.
        """
        for bucket in buckets:
            if bucket not in self._pieces:
                self._pieces[bucket] = deque(cut(self.plan, bucket, partition_bytes))
            self._orders.append(self._pieces[bucket].popleft())
            self._untold -= not self._pieces[bucket]
        return self._hand_over()

    def complete(self, bucket: int) -> list[Send]:
        """See :class:`Policy`."""
        self._complete.add(bucket)
        return self._hand_over()

    def _hand_over(self) -> list[Send]:
        sends: list[Send] = []
        while self._orders and self._orders[0].bucket in self._complete:
            sends.append(self._orders.popleft())
        return sends
