"""The lane planner: which bucket takes which lane, and when, chosen by simulated time.

Lanes rise with need order, and inside a lane buckets leave in the order of their gradients. What
the link cannot carry while backward runs has to be carried while forward runs, and it had better be
buckets all over the model than the most urgent ones, which such lanes would end with. So some are
*late*: their lane sends them after all its others, in need order.

Two kinds of plans are tried, each best in its range: such cuts, moved while that helps, where
communication takes as long as computing or less, and nested lanes (:mod:`tlsched.planning.nesting`)
where it takes longer.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tlsched.bands import LANE_COUNT
from tlsched.planning.fabric import Fabric
from tlsched.planning.lateness import Lanes, Lateness, cut_by
from tlsched.planning.nesting import nested
from tlsched.planning.plan import cut_by_bytes
from tlsched.planning.profile import Profile

# Late buckets: of what the link cannot carry during backward, and of these the part that may be the
# most urgent ones of all; the rest is spread evenly.
_LATE_SHARES = (0.6, 0.7, 0.8, 0.95, 1.1)
_FRONT_SHARES = (0.0, 0.05, 0.1, 0.25)
_PATIENCE = (0.0, 0.25, 1.0)  # of the mean bucket's seconds on the link
_WORTH = 1e-6  # of the computing: a smaller gain is none
_MOST_TRIES = 300  # plans tried by moving: a few tenths of a second


@dataclass(frozen=True, slots=True)
class Found:
    """Lanes and the greatest lateness that they leave."""

    lanes: Lanes
    lateness_s: float


def choose_lanes(
    profile: Profile, fabric: Fabric, *, lane_count: int = LANE_COUNT, hold_back: bool = True
) -> Lanes:
    """The lanes with which an iteration is shortest, as far as the search finds them.

    Never worse than equal bytes a lane. ``hold_back``: whether a lane may keep early gradients
    waiting; false for backends that launch all lanes in one order.
    """
    return find_lanes(profile, fabric, lane_count=lane_count, hold_back=hold_back).lanes


def find_lanes(
    profile: Profile, fabric: Fabric, *, lane_count: int = LANE_COUNT, hold_back: bool = True
) -> Found:
    """:func:`choose_lanes`, with the lateness that they leave."""
    search = _Search(profile, fabric)
    search.try_cuts(_Cuts(_equal_bytes(profile, lane_count)))
    if search.floor_reached:
        return search.best
    for shares in ([1.0] * lane_count, [2.0**lane for lane in range(lane_count)]):
        search.try_cuts(_Cuts(cut_by([1.0] * len(profile.buckets), shares)))
    if hold_back:
        for cuts in _with_late(profile, fabric, lane_count):
            search.try_cuts(cuts)
    search.move(late=hold_back)
    if hold_back:
        mean_s = fabric.seconds(profile.bytes) / max(1, len(profile.buckets))
        for part in _PATIENCE:
            search.try_lanes(nested(profile, fabric, lane_count, part * mean_s))
    return search.best


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Lane *i* ends before bucket ``cuts[i]`` and sends its ``late`` ones last."""

    cuts: tuple[int, ...]
    late: frozenset[int] = frozenset()

    def on(self, profile: Profile) -> Lanes:
        lanes = tuple(bisect.bisect_right(self.cuts, i) for i in range(len(profile.buckets)))
        early = [index for index in profile.launch_order if index not in self.late]
        return Lanes(lanes, (*early, *sorted(self.late)))

    def neighbours(self, count: int, *, late: bool) -> Iterator[_Cuts]:
        """All in which one cut or all from one on are moved, or a bucket becomes late or early."""
        steps = [sign * 2**power for power in range(count.bit_length() - 1) for sign in (1, -1)]
        for number in range(len(self.cuts)):
            for step in steps:
                for last in {number + 1, len(self.cuts)}:
                    yield _Cuts(_moved(self.cuts, number, last, step), self.late)
        for index in range(count) if late and self.late else ():
            yield _Cuts(self.cuts, self.late ^ {index})
            if index in self.late:
                for other in {index - 1, index + 1} - self.late:
                    yield _Cuts(self.cuts, self.late ^ {index, other})

    def possible(self, count: int) -> bool:
        """Whether the cuts are in order."""
        ends = (0, *self.cuts, count)
        inside = all(0 <= index < count for index in self.late)
        return inside and all(a <= b for a, b in itertools.pairwise(ends))


class _Search:
    """The best plan so far."""

    def __init__(self, profile: Profile, fabric: Fabric) -> None:
        self._profile = profile
        self._lateness = Lateness(profile, fabric)
        self._worth_s = _WORTH * profile.compute_s
        # Whatever the plan, the link has to carry everything.
        self._floor_s = max(0.0, fabric.seconds(profile.bytes) - profile.compute_s)
        self._best: Found | None = None
        self._best_cuts: tuple[_Cuts, float] | None = None

    @property
    def best(self) -> Found:
        assert self._best is not None
        return self._best

    @property
    def floor_reached(self) -> bool:
        return self.best.lateness_s <= self._floor_s + self._worth_s

    def try_lanes(self, lanes: Lanes) -> None:
        bound_s = self._best.lateness_s - self._worth_s if self._best else float("inf")
        lateness_s = self._lateness.of(lanes, bound_s)
        if lateness_s < bound_s:
            self._best = Found(lanes, lateness_s)

    def try_cuts(self, cuts: _Cuts) -> bool:
        """Whether these are the best cuts so far."""
        bound_s = self._best_cuts[1] - self._worth_s if self._best_cuts else float("inf")
        lanes = cuts.on(self._profile)
        lateness_s = self._lateness.of(lanes, bound_s)
        if lateness_s >= bound_s:
            return False
        self._best_cuts = cuts, lateness_s
        self._best = Found(lanes, lateness_s)
        return True

    def move(self, *, late: bool) -> None:
        """Move to the first better neighbour until there is none, or enough have been tried."""
        count = len(self._profile.buckets)
        assert self._best_cuts is not None
        tried = {self._best_cuts[0]}
        improved = True
        while improved and not self.floor_reached:
            improved = False
            for cuts in self._best_cuts[0].neighbours(count, late=late):
                if cuts in tried or not cuts.possible(count):
                    continue
                if len(tried) > _MOST_TRIES:
                    return
                tried.add(cuts)
                if self.try_cuts(cuts):
                    improved = True
                    break


def _moved(cuts: tuple[int, ...], first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(c + step if first <= number < last else c for number, c in enumerate(cuts))


def _equal_bytes(profile: Profile, lane_count: int) -> tuple[int, ...]:
    lanes = cut_by_bytes([bucket.bytes for bucket in profile.buckets], lane_count)
    return tuple(bisect.bisect_left(lanes, lane) for lane in range(1, lane_count))


def _with_late(profile: Profile, fabric: Fabric, lane_count: int) -> Iterator[_Cuts]:
    """Lanes of equal bytes, of equal numbers and growing ones, each with several sets of late."""
    excess_s = _excess_s(profile, fabric)
    if excess_s <= 0:
        return
    sizes = [float(bucket.bytes) for bucket in profile.buckets]
    growing = [2.0**lane for lane in range(lane_count)]
    equal = [1.0] * lane_count
    all_cuts = (cut_by(sizes, equal), cut_by([1.0] * len(sizes), equal), cut_by(sizes, growing))
    for share, front in itertools.product(_LATE_SHARES, _FRONT_SHARES):
        late = _late(profile, fabric, share * excess_s, front)
        for cuts in all_cuts:
            yield _Cuts(cuts, late)


def _excess_s(profile: Profile, fabric: Fabric) -> float:
    """Seconds of all bytes that the link cannot carry while backward runs."""
    first_s = min((bucket.ready_s for bucket in profile.buckets), default=0.0)
    return fabric.seconds(profile.bytes) - (profile.backward_s - first_s)


def _late(profile: Profile, fabric: Fabric, seconds: float, front: float) -> frozenset[int]:
    """Buckets that take ``seconds`` together, no more of them up to any need than is even.

    ``front`` of the seconds may be spent at once. The bucket that is ready first is never late.
    """
    late, spent_s = set(), 0.0
    rest = (1 - front) / profile.forward_s if profile.forward_s else 0.0
    for index, bucket in enumerate(profile.buckets):
        link_s = fabric.seconds(bucket.bytes)
        allowed_s = seconds * (front + rest * bucket.needed_s)
        if spent_s + link_s <= allowed_s and index != profile.launch_order[0]:
            late.add(index)
            spent_s += link_s
    return frozenset(late)
