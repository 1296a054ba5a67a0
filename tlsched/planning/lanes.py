"""The lane planner: which bucket takes which lane, and when, chosen by simulated time.

Lanes rise with need order, and inside a lane buckets leave in the order of their gradients. What
the link cannot carry while backward runs has to be carried while forward runs, and it had better be
buckets all over the model than the most urgent ones. So some may be put *late*: they share the last
lane, which sends them in need order when the last of their gradients is there.

A strict link serves lane 0 as if it were alone, lane 1 in what lane 0 leaves, and so on; so the
seconds of an iteration follow from a pass over the buckets, without events, and many plans can be
tried.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tlsched.bands import LANE_COUNT
from tlsched.planning.fabric import Fabric
from tlsched.planning.plan import cut_by_bytes
from tlsched.planning.profile import Profile

_Gap = tuple[float, float]  # from, to: the link is idle
_LATE = (1.0, 0.8, 0.6)  # of what the link cannot carry during backward, to begin with
_WORTH = 1e-6  # of an iteration: a smaller gain is none


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lane of each bucket, and the order in which buckets are handed over."""

    lanes: tuple[int, ...]
    launch_order: tuple[int, ...]


def choose_lanes(
    profile: Profile, fabric: Fabric, *, lane_count: int = LANE_COUNT, hold_back: bool = True
) -> Lanes:
    """The lanes with which an iteration is shortest, as far as a local search finds them.

    Never worse than equal bytes a lane. ``hold_back``: whether a lane may keep early gradients
    waiting; false for backends that launch all lanes in one order.
    """
    floor_s = max(profile.compute_s, fabric.seconds(profile.bytes))
    best: _Choice | None = None
    best_s = 0.0
    for begin in _beginnings(profile, fabric, lane_count, hold_back):
        found, seconds = _improve(profile, begin, fabric)
        if best is None or seconds < best_s * (1 - _WORTH):
            best, best_s = found, seconds
        if best_s <= floor_s * (1 + _WORTH):
            break
    assert best is not None
    return best.on(profile)


def iteration_s(profile: Profile, plan: Lanes, fabric: Fabric) -> float:
    """Seconds of an iteration in which strict bands serve the lanes, first in first out each.

    What :func:`tlsched.planning.simulate.simulate` gives for the policy ``kernel`` on a fabric of
    equal hosts without bulk flows.
    """
    arrived_s = _arrivals(profile, plan, fabric)
    clock_s = profile.backward_s
    before_s = 0.0
    for bucket, arrival_s in zip(profile.buckets, arrived_s, strict=True):
        clock_s = max(clock_s + bucket.needed_s - before_s, arrival_s)
        before_s = bucket.needed_s
    return clock_s + profile.forward_s - before_s


def _arrivals(profile: Profile, plan: Lanes, fabric: Fabric) -> list[float]:
    """When each bucket's average is there, from the beginning of backward."""
    arrived = [0.0] * len(plan.lanes)
    gaps: list[_Gap] = [(0.0, float("inf"))]
    members: dict[int, list[int]] = {}
    for index in plan.launch_order:
        members.setdefault(plan.lanes[index], []).append(index)
    for lane in sorted(members):
        taken: list[_Gap] = []
        free_s = 0.0
        for index in members[lane]:
            bucket = profile.buckets[index]
            begin_s = max(bucket.ready_s, free_s) + fabric.start_s
            free_s = _serve(gaps, begin_s, fabric.seconds(bucket.bytes), taken)
            arrived[index] = free_s
        gaps = _without(gaps, taken)
    return arrived


def _serve(gaps: list[_Gap], begin_s: float, seconds: float, taken: list[_Gap]) -> float:
    """Use the gaps from ``begin_s`` for ``seconds``; note them in ``taken`` and return the end."""
    number = max(0, bisect.bisect_right(gaps, (begin_s, float("inf"))) - 1)
    if seconds <= 0:
        return begin_s
    while True:
        start_s, stop_s = gaps[number]
        start_s = max(start_s, begin_s)
        if start_s < stop_s:
            used_s = min(seconds, stop_s - start_s)
            taken.append((start_s, start_s + used_s))
            seconds -= used_s
            if seconds <= 1e-12:
                return start_s + used_s
        number += 1


def _without(gaps: Sequence[_Gap], taken: Sequence[_Gap]) -> list[_Gap]:
    """``gaps`` less ``taken``, both in order."""
    left: list[_Gap] = []
    number = 0
    for start_s, stop_s in gaps:
        while number < len(taken) and taken[number][0] < stop_s:
            if taken[number][0] > start_s:
                left.append((start_s, taken[number][0]))
            start_s = taken[number][1]
            number += 1
        if start_s < stop_s:
            left.append((start_s, stop_s))
    return left


@dataclass(frozen=True, slots=True)
class _Choice:
    """Lane *i* ends before bucket ``cuts[i]``; ``late`` ones leave it for the last lane."""

    cuts: tuple[int, ...]
    late: frozenset[int] = frozenset()

    def on(self, profile: Profile) -> Lanes:
        last = len(self.cuts)
        lanes = [bisect.bisect_right(self.cuts, index) for index in range(len(profile.buckets))]
        for index in self.late:
            lanes[index] = last
        early = [index for index in profile.launch_order if index not in self.late]
        return Lanes(tuple(lanes), (*early, *sorted(self.late)))

    def neighbours(self, count: int) -> Iterator[_Choice]:
        """All in which one cut or all from one on are moved, or a bucket joins or leaves ``late``.

        Nobody joins where nobody is late: those choices begin with some.
        """
        steps = [sign * 2**power for power in range(count.bit_length()) for sign in (1, -1)]
        for number in range(len(self.cuts)):
            for step in steps:
                for last in {number + 1, len(self.cuts)}:
                    yield _Choice(_moved(self.cuts, number, last, step), self.late)
        for index in range(count) if self.late else ():
            yield _Choice(self.cuts, self.late ^ {index})
            if index in self.late:
                for other in {index - 1, index + 1} - self.late:
                    yield _Choice(self.cuts, self.late ^ {index, other})

    def possible(self, count: int) -> bool:
        """Whether the cuts are in order."""
        ends = (0, *self.cuts, count)
        return all(a <= b for a, b in itertools.pairwise(ends)) and all(
            0 <= index < count for index in self.late
        )


def _moved(cuts: tuple[int, ...], first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(c + step if first <= number < last else c for number, c in enumerate(cuts))


def _beginnings(
    profile: Profile, fabric: Fabric, lane_count: int, hold_back: bool
) -> Iterator[_Choice]:
    """Equal bytes, equal numbers, lanes that grow from the front, and those with late buckets."""
    count = len(profile.buckets)
    lanes = range(1, lane_count)
    sizes = [bucket.bytes for bucket in profile.buckets]
    yield _Choice(_equal_bytes(sizes, lane_count))
    yield _Choice(tuple(round(count * lane / lane_count) for lane in lanes))
    yield _Choice(tuple(round(count * (2**lane - 1) / (2**lane_count - 1)) for lane in lanes))
    for part in _LATE if hold_back else ():
        late = _spread(profile, part * _excess(profile, fabric))
        if late:
            early = [0 if index in late else size for index, size in enumerate(sizes)]
            yield _Choice((*_equal_bytes(early, lane_count - 1), count), late)


def _equal_bytes(sizes: Sequence[int], lane_count: int) -> tuple[int, ...]:
    lanes = cut_by_bytes(sizes, lane_count)
    return tuple(bisect.bisect_left(lanes, lane) for lane in range(1, lane_count))


def _excess(profile: Profile, fabric: Fabric) -> float:
    """The part of all bytes that the link cannot carry while backward runs."""
    first_s = min(bucket.ready_s for bucket in profile.buckets)
    needed_s = fabric.seconds(profile.bytes)
    return max(0.0, 1 - (profile.backward_s - first_s) / needed_s) if needed_s else 0.0


def _spread(profile: Profile, part: float) -> frozenset[int]:
    """Buckets that make up ``part`` of the bytes, spread evenly, not those that are ready first."""
    late, owed = set(), 0.0
    for index in sorted(range(len(profile.buckets)), key=lambda i: profile.buckets[i].needed_s):
        size = profile.buckets[index].bytes
        owed += part * size
        if owed >= size and index != profile.launch_order[0]:
            late.add(index)
            owed -= size
    return frozenset(late)


def _improve(profile: Profile, begin: _Choice, fabric: Fabric) -> tuple[_Choice, float]:
    """Move to the first better neighbour until there is none."""
    count = len(profile.buckets)
    best, best_s = begin, iteration_s(profile, begin.on(profile), fabric)
    tried = {begin}
    improved = True
    while improved:
        improved = False
        for choice in best.neighbours(count):
            if choice in tried or not choice.possible(count):
                continue
            tried.add(choice)
            seconds = iteration_s(profile, choice.on(profile), fabric)
            if seconds < best_s * (1 - _WORTH):
                best, best_s, improved = choice, seconds, True
                break
    return best, best_s
