"""What every policy shares: buckets enter their lane in one fixed order, whoever is early waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tlsched.errors import ConfigError
from tlsched.planning.plan import Plan

# Pieces may be handed over while other threads use lane 0 (buffers, sparse gradients), at a moment
# that differs between ranks; so they have a lane of their own.
PIECES_LANE = 1


@dataclass(frozen=True, slots=True)
class Send:
    """Hand ``bucket`` (its index in need order) to ``lane`` now.

    Or a piece of it: its bytes from ``start`` to before ``stop`` (None: all of them).
    """

    bucket: int
    lane: int
    start: int = 0
    stop: int | None = None


class Policy:
    """Sends each bucket once a round, on its plan's lane, in the plan's launch order inside a lane.

    All ranks must hand the buckets of one lane over in the same order, or their collectives would
    meet the wrong partners; between lanes each rank is free. So a bucket that is early is held back
    until those before it in its lane are complete, as DistributedDataParallel does.

    ``barrier`` tells that step() waits for everything; ``marked`` that lanes carry marks.
    ``lane_count`` is how many lanes its plans may use. ``one_order`` makes the launch order hold
    across lanes too: see :func:`in_one_order`.

    ``immediate`` tells that parameter servers send back each segment's sum as soon as it is
    complete, so that pushing a bucket and pulling it coincide; otherwise they send nothing back
    before they have the whole of what was handed over, as classical parameter servers do.

    ``pieces`` tells that what is handed over may be parts of buckets, and that some is handed over
    only when others have been averaged; ``dictated`` that rank 0 decides the order and all others
    follow it.
    """

    pieces = False
    dictated = False

    def __init__(
        self,
        plan: Plan,
        *,
        barrier: bool,
        marked: bool,
        lane_count: int = 1,
        one_order: bool = False,
        immediate: bool = False,
    ) -> None:
        self.plan = plan
        self.barrier = barrier
        self.marked = marked
        self.lane_count = lane_count
        self.one_order = one_order
        self.immediate = immediate
        self._waiting: dict[int, deque[int]] = {}
        self._complete: set[int] = set()
        self.start_round()

    def start_round(self) -> None:
        """Forget what was complete: a new backward begins."""
        self._waiting = {}
        for bucket in self.plan.launch_order:
            self._waiting.setdefault(self._line(bucket), deque()).append(bucket)
        self._complete.clear()

    def complete(self, bucket: int) -> list[Send]:
        """``bucket``'s gradient is complete: the buckets that its lane can take now."""
        self._complete.add(bucket)
        queue = self._waiting[self._line(bucket)]
        sends: list[Send] = []
        while queue and queue[0] in self._complete:
            first = queue.popleft()
            sends.append(Send(first, self.plan.buckets[first].lane))
        return sends

    def sent(self, send: Send) -> list[Send]:
        """What was handed over as ``send`` has been averaged: what can be handed over now."""
        return []

    def _line(self, bucket: int) -> int:
        """The number of the queue in which ``bucket`` waits for those before it."""
        return 0 if self.one_order else self.plan.buckets[bucket].lane


def in_one_order(policy: Policy) -> Policy:
    """``policy`` with all lanes launched in the one order of its plan.

    For backends whose groups are not independent: NCCL's communicators on one GPU may block each
    other unless all ranks launch them in the same order (NCCL user guide, "Using multiple NCCL
    communicators concurrently"). A bucket that is early waits for those of other lanes as well.
    Raises ConfigError for a policy that hands over pieces: it does so when others have arrived,
    which is no moment in that order.
    """
    if policy.pieces:
        raise ConfigError(
            "this policy hands over pieces of buckets, which only gloo's lanes take",
            hint='use policy="kernel", or backend="gloo"',
        )
    return Policy(
        policy.plan,
        barrier=policy.barrier,
        marked=policy.marked,
        lane_count=policy.lane_count,
        one_order=True,
        immediate=policy.immediate,
    )
