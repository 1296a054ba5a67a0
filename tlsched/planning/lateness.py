"""How long an iteration takes under strict lanes, without events: what the planner minimises.

A strict link serves lane 0 as if it were alone, lane 1 in what lane 0 leaves idle, and so on. An
iteration is longer than its computing by the latest bucket's lateness: how long after its time, had
nothing been late before it, its average arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlsched.planning.fabric import Fabric
from tlsched.planning.profile import Profile


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lane of each bucket, and the order in which buckets are handed over."""

    lanes: tuple[int, ...]
    launch_order: tuple[int, ...]


def iteration_s(profile: Profile, plan: Lanes, fabric: Fabric) -> float:
    """Seconds of an iteration in which strict bands serve the lanes, first in first out each.

    What :func:`tlsched.planning.simulate.simulate` gives for the policy ``kernel`` on a fabric of
    equal hosts whose rate does not change and which carries nothing else.
    """
    return profile.compute_s + Lateness(profile, fabric).of(plan)


def oracle_s(profile: Profile, fabric: Fabric) -> float:
    """Seconds of an iteration with a lane for each bucket: no plan and no policy needs less."""
    lanes = tuple(range(len(profile.buckets)))
    return iteration_s(profile, Lanes(lanes, profile.launch_order), fabric)


class Lateness:
    """The lateness of plans for one profile on one fabric."""

    def __init__(self, profile: Profile, fabric: Fabric) -> None:
        self._ready_s = [bucket.ready_s for bucket in profile.buckets]
        self._link_s = [fabric.seconds(bucket.bytes) for bucket in profile.buckets]
        self._due_s = [profile.backward_s + bucket.needed_s for bucket in profile.buckets]
        self._start_s = fabric.start_s

    def of(self, plan: Lanes, bound_s: float = math.inf) -> float:
        """The greatest lateness in seconds; when it is ``bound_s`` or more, some of it."""
        members: dict[int, list[int]] = {}
        for index in plan.launch_order:
            members.setdefault(plan.lanes[index], []).append(index)
        idle = _Idle()
        worst_s = 0.0
        for lane in sorted(members):
            free_s = 0.0
            for index in members[lane]:
                begin_s = max(self._ready_s[index], free_s) + self._start_s
                free_s = idle.serve(begin_s, self._link_s[index])
                worst_s = max(worst_s, free_s - self._due_s[index])
            if worst_s >= bound_s:
                break
            idle.next_lane()
        return worst_s


class _Idle:
    """When the link is idle, in order of time; one lane after another uses it, each going forward.

    ``_begins`` and ``_ends`` are the intervals that the lanes before have left.
    """

    def __init__(self) -> None:
        self._begins, self._ends = [0.0], [math.inf]
        self._restart()

    def serve(self, begin_s: float, seconds: float) -> float:
        """Use the link from ``begin_s``, not before the lane's last end, and return the end."""
        self._pass(begin_s)
        if seconds <= 0:
            return begin_s
        while seconds > self._end - self._begin:
            seconds -= self._end - self._begin
            self._step()
        self._begin += seconds
        return self._begin

    def next_lane(self) -> None:
        """What this lane has left is the next one's."""
        if self._begin < self._end:
            self._leave(self._end)
        self._begins = self._left_begins + self._begins[self._number + 1 :]
        self._ends = self._left_ends + self._ends[self._number + 1 :]
        self._restart()

    def _restart(self) -> None:
        self._number = 0
        self._begin, self._end = self._begins[0], self._ends[0]
        self._left_begins: list[float] = []
        self._left_ends: list[float] = []

    def _pass(self, until_s: float) -> None:
        """Leave unused what lies before ``until_s``."""
        while self._end <= until_s:
            if self._begin < self._end:
                self._leave(self._end)
            self._step()
        if self._begin < until_s:
            self._leave(until_s)
            self._begin = until_s

    def _leave(self, until_s: float) -> None:
        self._left_begins.append(self._begin)
        self._left_ends.append(until_s)

    def _step(self) -> None:
        self._number += 1
        self._begin, self._end = self._begins[self._number], self._ends[self._number]


def cut_by(sizes: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """Where buckets of ``sizes`` are cut into lanes of these ``shares`` of all: the first of each.

    A bucket is in the lane in which its middle lies. The first lane's begin is left out.
    """
    total, lane, before = sum(sizes), 0, 0.0
    ends = [sum(shares[: number + 1]) / sum(shares) * total for number in range(len(shares) - 1)]
    cuts = []
    for index, size in enumerate(sizes):
        while lane < len(ends) and before + size / 2 >= ends[lane]:
            cuts.append(index)
            lane += 1
        before += size
    return (*cuts, *[len(sizes)] * (len(ends) - len(cuts)))
