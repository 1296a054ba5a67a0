"""prophet: blocks of gradients that end before a more urgent gradient is due.

After Prophet (ICPP 2021, doi 10.1145/3472456.3472467): backward produces gradients in steps, and
what is sent between two steps should be done when the next one comes, since that is more urgent.
So the time until then is filled with a block: of several gradients, or of a part of one. When
backward is over nothing more urgent can come, and the rest goes by need.

Profile and rate are the same on all ranks, and so are the blocks made from them (in plain IEEE
double arithmetic, operation by operation): nobody dictates an order while training runs.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlsched.errors import ConfigError
from tlsched.planning.fabric import Fabric
from tlsched.planning.plan import Plan, single_lane
from tlsched.planning.policies.base import PIECES_LANE, Policy, Send
from tlsched.planning.policies.settings import ALIGN_BYTES, PolicySettings
from tlsched.planning.profile import Profile

# A part of a bucket is not made so small that starting it costs more than this part of it.
START_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Block:
    """``sends`` one after another; seconds from the beginning of backward, as they are planned."""

    start_s: float
    stop_s: float
    sends: tuple[Send, ...]


def prophet(plan: Plan, settings: PolicySettings) -> Prophet:
    """The policy ``prophet`` for ``plan``. Raises ConfigError when the profile is another plan's.

    Until profile and fabric are known, whole buckets go in the order of their gradients.
    """
    if settings.profile is None or settings.fabric is None:
        return Prophet(plan, [Send(bucket, PIECES_LANE) for bucket in plan.launch_order])
    if [b.names for b in settings.profile.buckets] != [b.names for b in plan.buckets]:
        raise ConfigError(
            "the profile has other buckets than the plan",
            hint="use a profile that was measured with this plan",
        )
    # A measured profile counts a bucket's padding as well.
    sizes = zip(settings.profile.buckets, plan.buckets, strict=True)
    exact = tuple(replace(timed, bytes=planned.bytes) for timed, planned in sizes)
    made = blocks(replace(settings.profile, buckets=exact), settings.fabric)
    return Prophet(plan, [send for block in made for send in block.sends])


def blocks(profile: Profile, fabric: Fabric) -> list[Block]:
    """All of ``profile``'s gradients, cut and ordered for ``fabric``.

    A block ends before a gradient is due that is more urgent than any part of it, unless even
    the smallest part worth sending would not: the link does not lie idle beside waiting bytes.
    """
    return _Assembly(profile, fabric).blocks()


class Prophet(Policy):
    """Hands over ``sends`` in their order, each as soon as it and those before it are complete.

    A lane sends in the order of handing over, so nothing is gained by keeping a piece back.
    """

    pieces = True

    def __init__(self, plan: Plan, sends: Sequence[Send]) -> None:
        self._sends = sends
        super().__init__(
            single_lane(plan, PIECES_LANE), barrier=False, marked=False, lane_count=PIECES_LANE + 1
        )

    def start_round(self) -> None:
        """See :class:`Policy`."""
        self._left = deque(self._sends)
        self._complete = set()

    def complete(self, bucket: int) -> list[Send]:
        """See :class:`Policy`."""
        self._complete.add(bucket)
        sends: list[Send] = []
        while self._left and self._left[0].bucket in self._complete:
            sends.append(self._left.popleft())
        return sends


class _Assembly:
    """A clock that runs from block to block, and what waits at its time."""

    def __init__(self, profile: Profile, fabric: Fabric) -> None:
        self._buckets = profile.buckets
        self._start_s = fabric.start_s
        self._byte_s = fabric.seconds(1)
        self._coming = deque(profile.launch_order)
        self._waiting: list[int] = []  # in need order
        self._sent = [0] * len(profile.buckets)
        self._now_s = 0.0
        least = self._start_s / START_SHARE / self._byte_s if self._byte_s else 0.0
        self._least = max(ALIGN_BYTES, _aligned(least))

    def blocks(self) -> list[Block]:
        made = []
        while self._waiting or self._coming:
            if not self._waiting:
                self._now_s = max(self._now_s, self._buckets[self._coming[0]].ready_s)
            while self._coming and self._buckets[self._coming[0]].ready_s <= self._now_s:
                bisect.insort(self._waiting, self._coming.popleft())
            made.append(self._next())
            self._now_s = made[-1].stop_s
        return made

    def _next(self) -> Block:
        begin_s = end_s = self._now_s
        sends: list[Send] = []
        for index in list(self._waiting):
            left = self._buckets[index].bytes - self._sent[index]
            room_s = self._due_s(index) - end_s - self._start_s
            size = left if room_s >= left * self._byte_s else _aligned(room_s / self._byte_s)
            if size < min(left, self._least):
                if sends:
                    break
                size = min(left, self._least)
            sends.append(self._take(index, size))
            end_s += self._start_s + size * self._byte_s
            if size < left:
                break
        return Block(begin_s, end_s, tuple(sends))

    def _take(self, index: int, size: int) -> Send:
        start = self._sent[index]
        self._sent[index] = stop = start + size
        if stop < self._buckets[index].bytes:
            return Send(index, PIECES_LANE, start, stop)
        self._waiting.remove(index)
        return Send(index, PIECES_LANE, start)

    def _due_s(self, index: int) -> float:
        """When the next gradient is there that is more urgent than bucket ``index``."""
        urgent = (self._buckets[i].ready_s for i in self._coming if i < index)
        return next(urgent, float("inf"))


def _aligned(size: float) -> int:
    return int(size) // ALIGN_BYTES * ALIGN_BYTES if size > 0 else 0
