"""What every policy shares: buckets enter their lane in one fixed order, whoever is early waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tlsched.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Send:
    """Hand ``bucket`` (its index in need order) to ``lane`` now."""

    bucket: int
    lane: int


class Policy:
    """Sends each bucket once a round, on its plan's lane, in the plan's launch order inside a lane.

    All ranks must hand the buckets of one lane over in the same order, or their collectives would
    meet the wrong partners; between lanes each rank is free. So a bucket that is early is held back
    until those before it in its lane are complete, as DistributedDataParallel does.

    ``barrier`` tells that step() waits for everything; ``tagged`` that lanes carry marks.
    """

    def __init__(self, plan: Plan, *, barrier: bool, tagged: bool) -> None:
        self.plan = plan
        self.barrier = barrier
        self.tagged = tagged
        self._waiting: dict[int, deque[int]] = {}
        self._complete: set[int] = set()
        self.start_round()

    def start_round(self) -> None:
        """Forget what was complete: a new backward begins."""
        self._waiting = {}
        for bucket in self.plan.launch_order:
            self._waiting.setdefault(self.plan.buckets[bucket].lane, deque()).append(bucket)
        self._complete.clear()

    def complete(self, bucket: int) -> list[Send]:
        """``bucket``'s gradient is complete: the buckets that its lane can take now."""
        self._complete.add(bucket)
        lane = self.plan.buckets[bucket].lane
        queue = self._waiting[lane]
        sends: list[Send] = []
        while queue and queue[0] in self._complete:
            sends.append(Send(queue.popleft(), lane))
        return sends
