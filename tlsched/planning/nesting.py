"""Lanes by nesting: what an unlimited number of lanes would do, with no more than there are.

A bucket that is more urgent than the one on its way interrupts it from the next lane above. Where
that is lane 0 already, it waits for its end. Every lane's order is the order of these beginnings,
so it follows the gradients, and between them the need.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from tlsched.planning.fabric import Fabric
from tlsched.planning.lateness import Lanes
from tlsched.planning.profile import Profile


@dataclass(slots=True)
class _Moving:
    bucket: int
    lane: int
    left_s: float
    begin_s: float


def nested(profile: Profile, fabric: Fabric, lane_count: int, patience_s: float = 0.0) -> Lanes:
    """The lanes when a bucket that ends within ``patience_s`` is not interrupted."""
    return _Nesting(profile, fabric, lane_count, patience_s).lanes()


class _Nesting:
    """``_stack``: what is on its way, each more urgent than those before it; one a lane."""

    def __init__(
        self, profile: Profile, fabric: Fabric, lane_count: int, patience_s: float
    ) -> None:
        self._buckets = profile.buckets
        self._fabric = fabric
        self._lane_count = lane_count
        self._patience_s = patience_s + fabric.start_s
        self._coming = list(reversed(profile.launch_order))
        self._ready: list[int] = []
        self._stack: list[_Moving] = []
        self._lanes = [0] * len(self._buckets)
        self._order: list[int] = []
        self._now_s = 0.0

    def lanes(self) -> Lanes:
        while self._coming or self._ready or self._stack:
            self._receive()
            while self._ready and self._may_begin(self._ready[0]):
                self._begin(heapq.heappop(self._ready))
            self._advance()
        return Lanes(tuple(self._lanes), tuple(self._order))

    def _receive(self) -> None:
        while self._coming and self._buckets[self._coming[-1]].ready_s <= self._now_s:
            heapq.heappush(self._ready, self._coming.pop())

    def _may_begin(self, bucket: int) -> bool:
        if not self._stack:
            return True
        top = self._stack[-1]
        left_s = top.left_s + max(0.0, top.begin_s - self._now_s)
        return top.lane > 0 and bucket < top.bucket and left_s > self._patience_s

    def _begin(self, bucket: int) -> None:
        link_s = self._fabric.seconds(self._buckets[bucket].bytes)
        self._lanes[bucket] = (self._stack[-1].lane if self._stack else self._lane_count) - 1
        self._order.append(bucket)
        begin_s = self._now_s + self._fabric.start_s
        self._stack.append(_Moving(bucket, self._lanes[bucket], link_s, begin_s))

    def _advance(self) -> None:
        """On to the next gradient, the next beginning or the next end."""
        moving = next((m for m in reversed(self._stack) if m.begin_s <= self._now_s), None)
        times_s = [m.begin_s for m in self._stack if m.begin_s > self._now_s]
        if self._coming:
            times_s.append(self._buckets[self._coming[-1]].ready_s)
        end_s = math.inf if moving is None else self._now_s + moving.left_s
        next_s = min(end_s, *times_s) if times_s else end_s
        if moving is not None and end_s <= next_s:
            self._stack.remove(moving)
        elif moving is not None:
            moving.left_s -= next_s - self._now_s
        self._now_s = next_s
