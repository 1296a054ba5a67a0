"""The planner: close to the oracle on the five shapes, and never worse than equal bytes."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.profiles import FABRIC, equal_layers, fabrics, layered, profiles
from tlsched.bands import LANE_COUNT
from tlsched.errors import ConfigError
from tlsched.planning.compare import expect, verdict
from tlsched.planning.ddp import ddp_plan
from tlsched.planning.fabric import Fabric
from tlsched.planning.fusing import fused, plan_on, profile_of_plan
from tlsched.planning.lanes import choose_lanes, find_lanes
from tlsched.planning.lateness import Lanes, iteration_s, oracle_s
from tlsched.planning.nesting import nested
from tlsched.planning.plan import (
    FUSE_BYTES,
    TINY_BYTES,
    BucketPlan,
    Plan,
    cut_by_bytes,
    standard_fuse_bytes,
)
from tlsched.planning.planner import expected_s, plan_for
from tlsched.planning.profile import BucketProfile, Profile
from tlsched.shapes.catalog import layers_of
from tlsched.shapes.derive import profile_of_layers
from tlsched.shapes.names import SHAPE_NAMES

RATIOS = (0.5, 1.0, 1.5, 3.0)
LAB_BYTES = 55e6  # what a lab's shapes are scaled to


def _shape(name: str, fabric: Fabric, ratio: float, scale: float) -> Profile:
    layers = layers_of(name)
    size = profile_of_layers(layers, compute_s=1.0, scale=scale).bytes
    return profile_of_layers(layers, compute_s=fabric.seconds(size) / ratio, scale=scale)


def _equal_bytes_s(profile: Profile, fabric: Fabric) -> float:
    lanes = tuple(cut_by_bytes([bucket.bytes for bucket in profile.buckets]))
    return iteration_s(profile, Lanes(lanes, profile.launch_order), fabric)


def _standard(profile: Profile) -> Profile:
    return fused(profile, standard_fuse_bytes(profile.bytes))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("where", ["lab", "10gbit"])
@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_a_shapes_plan_is_close_to_the_oracle(name: str, where: str, ratio: float) -> None:
    """The oracle has a lane for each module, and its buckets cost nothing to start."""
    fabric = Fabric(4, 1e9 if where == "lab" else 10e9)
    whole = 4 * sum(layer.elements for layer in layers_of(name))
    profile = _shape(name, fabric, ratio, LAB_BYTES / whole if where == "lab" else 1.0)
    free = Fabric(4, fabric.rate_bps, step_s=0.0, efficiency=fabric.efficiency)
    seconds = expected_s(plan_for(profile, fabric), profile, fabric)
    assert oracle_s(profile, free) / seconds >= 0.98
    assert seconds <= _equal_bytes_s(fused(profile, standard_fuse_bytes(profile.bytes)), fabric) * (
        1 + 1e-9
    )


@pytest.mark.parametrize(("count", "least"), [(24, 0.969), (48, 0.976)])
def test_equal_layers_that_just_fit_are_the_hardest(count: int, least: float) -> None:
    profile = equal_layers(count, 55_000_000 // count, 1.0)
    seconds = iteration_s(profile, choose_lanes(profile, FABRIC), FABRIC)
    assert oracle_s(profile, FABRIC) / seconds >= least


@settings(deadline=None, max_examples=60)
@given(profiles(), fabrics, st.booleans())
def test_never_worse_than_equal_bytes(profile: Profile, fabric: Fabric, hold_back: bool) -> None:
    found = find_lanes(profile, fabric, hold_back=hold_back)
    seconds = iteration_s(profile, found.lanes, fabric)
    assert seconds == pytest.approx(profile.compute_s + found.lateness_s)
    assert seconds <= _equal_bytes_s(profile, fabric) * (1 + 1e-9)
    assert seconds >= oracle_s(profile, fabric) * (1 - 1e-9)
    assert set(found.lanes.lanes) <= set(range(LANE_COUNT))
    assert sorted(found.lanes.launch_order) == list(range(len(profile.buckets)))
    if not hold_back:
        assert found.lanes.launch_order == profile.launch_order


@settings(deadline=None, max_examples=40)
@given(profiles(), fabrics)
def test_a_plan_has_every_parameter_once_and_is_the_same_again(
    profile: Profile, fabric: Fabric
) -> None:
    plan = plan_for(profile, fabric)
    names = [name for bucket in plan.buckets for name in bucket.names]
    assert names == [name for bucket in profile.buckets for name in bucket.names]
    assert sum(bucket.bytes for bucket in plan.buckets) == profile.bytes
    assert sorted(plan.launch_order) == list(range(len(plan.buckets)))
    assert plan_for(profile, fabric).digest() == plan.digest()
    standard = _standard(profile)
    seconds = expected_s(plan, profile, fabric)
    assert seconds <= _equal_bytes_s(standard, fabric) * (1 + 1e-9)
    # Whatever is fused, one lane a module is better.
    assert seconds >= oracle_s(profile, fabric) * (1 - 1e-9)


@settings(deadline=None, max_examples=40)
@given(profiles(), fabrics, st.integers(1, 8), st.floats(0.0, 0.1))
def test_nested_lanes_hold_every_bucket(
    profile: Profile, fabric: Fabric, lane_count: int, patience_s: float
) -> None:
    lanes = nested(profile, fabric, lane_count, patience_s)
    assert sorted(lanes.launch_order) == list(range(len(profile.buckets)))
    assert set(lanes.lanes) <= set(range(lane_count))


def test_with_as_many_lanes_as_buckets_nesting_is_the_oracle() -> None:
    profile = equal_layers(12, 1_000_000, 1.0)
    lanes = nested(profile, FABRIC, 12)
    assert iteration_s(profile, lanes, FABRIC) == pytest.approx(oracle_s(profile, FABRIC))


def test_a_long_iteration_ends_too() -> None:
    """Seconds so large that adding a bucket's end to them rounds it away."""
    profile = layered([1, 1, 10**12], [1e5, 1e5, 1e5])
    assert len(nested(profile, FABRIC, 6).lanes) == 3


def test_fusing_joins_neighbours_of_one_kind() -> None:
    def bucket(name: str, size: int, kind: str = "") -> BucketProfile:
        return BucketProfile((name,), size, 1.0 - 0.1 * len(name), 0.1 * len(name), kind)

    names = ["a", "bb", "ccc", "dddd", "eeeee"]
    sizes = [FUSE_BYTES, TINY_BYTES, 1000, 1000, 1000]
    kinds = ["f32", "f32", "f32", "f16", "f32"]
    profile = Profile(tuple(map(bucket, names, sizes, kinds)), 1.0, 1.0)
    joined = fused(profile, FUSE_BYTES)
    assert [b.names for b in joined.buckets] == [("a", "bb", "ccc"), ("dddd",), ("eeeee",)]
    first = joined.buckets[0]
    assert (first.ready_s, first.needed_s) == (profile.buckets[0].ready_s, 0.1)
    assert joined.bytes == profile.bytes
    assert len(fused(profile, 0).buckets) == 5


def test_ddp_closes_a_bucket_when_it_has_reached_its_size() -> None:
    mib = 2**20
    profile = layered([20 * mib, 10 * mib, 8 * mib, 30 * mib, mib], [1.0] * 5)
    plan = ddp_plan(profile)
    groups = [bucket.names for bucket in plan.buckets]
    assert groups == [("p0", "p1", "p2"), ("p3",), ("p4",)]
    assert plan.launch_order == tuple(reversed(range(len(plan.buckets))))
    assert sum(bucket.bytes for bucket in plan.buckets) == profile.bytes
    assert len(ddp_plan(profile, cap_bytes=1).buckets) == 5


@given(profiles(), st.integers(1, 3_000_000))
def test_ddps_buckets_are_a_plan_of_the_profile(profile: Profile, cap_bytes: int) -> None:
    plan = ddp_plan(profile, cap_bytes, cap_bytes // 4)
    sent = profile_of_plan(profile, plan)
    assert sent.bytes == profile.bytes
    assert [bucket.names for bucket in sent.buckets] == [bucket.names for bucket in plan.buckets]
    assert sent.launch_order == plan.launch_order


def test_a_plan_of_other_parameters_is_refused() -> None:
    profile = layered([10, 10], [1.0, 1.0])
    for names in (("p0", "p9"), ("p0",), ()):
        plan = Plan((BucketPlan(names, 20, 0),) if names else (), (0,) if names else ())
        with pytest.raises(ConfigError, match="not made of the profile's buckets"):
            profile_of_plan(profile, plan)
    halves = Profile((BucketProfile(("a", "b"), 8, 0.0, 0.0),), 1.0, 1.0)
    with pytest.raises(ConfigError):
        profile_of_plan(halves, Plan((BucketPlan(("a",), 4, 0), BucketPlan(("b",), 4, 0)), (0, 1)))


def test_a_plan_on_a_profile_keeps_its_buckets() -> None:
    profile = layered([10, 20], [1.0, 1.0])
    plan = plan_on(profile, [1, 0], [1, 0])
    assert profile_of_plan(profile, plan) == profile
    assert [bucket.lane for bucket in plan.buckets] == [1, 0]


def test_the_verdict_is_plain() -> None:
    wanted = ["ddp", "kernel", "oracle"]
    worth = equal_layers(24, 2_000_000, 1.0)
    line = verdict(expect(worth, FABRIC, wanted), worth, FABRIC, "1gbit")
    form = (
        r"1\.\d\dx at 1gbit \(no schedule gains more than 1\.\d\dx\): communication is 100% of .*"
    )
    assert re.fullmatch(form, line)
    idle = equal_layers(24, 2_000_000, 0.01)
    line = verdict(expect(idle, FABRIC, wanted), idle, FABRIC, "1gbit")
    assert line == "nothing to gain at 1gbit: communication is 1% of computation"


def test_two_hundred_buckets_are_planned_soon() -> None:
    """About a second on one processor; processor time, since tests share machines."""
    profile = equal_layers(200, 4_000_000, 1.0)
    begin_s = time.process_time()
    plan_for(profile, FABRIC)
    assert time.process_time() - begin_s < 5.0
