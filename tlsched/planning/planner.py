"""From a profile to a plan: which neighbours share a bucket, and which lanes the buckets take."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.planning.fabric import Fabric
from tlsched.planning.fusing import fused, plan_on, profile_of_plan
from tlsched.planning.lanes import find_lanes
from tlsched.planning.lateness import Lanes, iteration_s
from tlsched.planning.plan import Plan, standard_fuse_bytes
from tlsched.planning.profile import Profile

# Buckets are fused up to so many times the bytes that the link carries while a ring starts up.
_FUSE_STARTS = (0.25, 1.0, 4.0, 8.0)
# What a bucket costs the training process in hooks, locks and calls: of two plans that take nearly
# the same time on the network, the one with fewer buckets.
BUCKET_S = 50e-6


def plan_for(profile: Profile, fabric: Fabric, *, hold_back: bool = True) -> Plan:
    """The plan for ``profile``, whose buckets are as fine as they can be: modules, not yet fused.

    Never worse in simulated time than equal bytes a lane with the same buckets, or with neighbours
    fused as they are without a profile. ``hold_back``: false for backends that launch all lanes in
    one order.
    """
    best: tuple[float, Plan] | None = None
    allowed_s = float("inf")
    for units in fusings(profile, fabric):
        found = find_lanes(units, fabric, hold_back=hold_back)
        seconds = profile.compute_s + found.lateness_s
        if best is None:
            allowed_s = seconds  # the first is the standard, which no other may exceed
        cost_s = seconds + BUCKET_S * len(units.buckets)
        if seconds <= allowed_s and (best is None or cost_s < best[0]):
            best = cost_s, plan_on(units, found.lanes.lanes, found.lanes.launch_order)
    assert best is not None
    return best[1]


def expected_s(plan: Plan, profile: Profile, fabric: Fabric) -> float:
    """Seconds of an iteration under the policy ``kernel`` with ``plan``, made from ``profile``."""
    lanes = Lanes(tuple(bucket.lane for bucket in plan.buckets), plan.launch_order)
    return iteration_s(profile_of_plan(profile, plan), lanes, fabric)


def fusings(profile: Profile, fabric: Fabric) -> Iterator[Profile]:
    """Different numbers of buckets: as without a profile first, then from fine to coarse."""
    standard = fused(profile, standard_fuse_bytes(profile.bytes))
    yield standard
    seen = {len(standard.buckets)}
    start_bytes = fabric.start_s / fabric.seconds(1) if fabric.seconds(1) else 0.0
    for starts in _FUSE_STARTS:
        units = fused(profile, starts * start_bytes)
        if len(units.buckets) not in seen:
            seen.add(len(units.buckets))
            yield units
