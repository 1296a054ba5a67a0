"""The plan: every parameter once, lanes rising with need order, the same on every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tlsched.bands import LANE_COUNT
from tlsched.planning.plan import (
    FUSE_BYTES,
    FUSE_PARTS,
    TINY_BYTES,
    ParameterInfo,
    Plan,
    cut_by_bytes,
    make_plan,
    single_lane,
)


@st.composite
def parameters(draw: st.DrawFn) -> tuple[list[ParameterInfo], dict[str, int]]:
    """Parameters in need order, a few to a module, and the order of their gradients."""
    infos: list[ParameterInfo] = []
    for module in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["float32", "bfloat16"]))
        for number in range(draw(st.integers(1, 3))):
            size = draw(st.one_of(st.integers(0, 4 * FUSE_BYTES), st.integers(0, TINY_BYTES)))
            reader = draw(st.sampled_from([f"m{module}", None]))
            infos.append(ParameterInfo(f"m{module}.p{number}", size, kind, reader))
    order = draw(st.permutations([info.name for info in infos]))
    return infos, {name: rank for rank, name in enumerate(order)}


@given(parameters())
def test_each_parameter_is_in_one_bucket_of_its_kind(
    given_: tuple[list[ParameterInfo], dict[str, int]],
) -> None:
    infos, ready = given_
    plan = make_plan(infos, ready)
    assert [name for bucket in plan.buckets for name in bucket.names] == [i.name for i in infos]
    kinds = {info.name: info.kind for info in infos}
    sizes = {info.name: info.bytes for info in infos}
    for bucket in plan.buckets:
        assert len({kinds[name] for name in bucket.names}) == 1
        assert bucket.bytes == sum(sizes[name] for name in bucket.names)


@given(parameters())
def test_launch_order_is_the_order_of_the_last_gradient(
    given_: tuple[list[ParameterInfo], dict[str, int]],
) -> None:
    infos, ready = given_
    plan = make_plan(infos, ready)
    assert sorted(plan.launch_order) == list(range(len(plan.buckets)))
    last = [max(ready[name] for name in plan.buckets[i].names) for i in plan.launch_order]
    assert last == sorted(last)


@given(parameters())
def test_equal_facts_make_equal_plans(
    given_: tuple[list[ParameterInfo], dict[str, int]],
) -> None:
    infos, ready = given_
    assert make_plan(infos, ready).digest() == make_plan(list(infos), dict(ready)).digest()


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200))
def test_lanes_rise_with_need_order_and_share_the_bytes(sizes: list[int]) -> None:
    lanes = cut_by_bytes(sizes)
    assert lanes == sorted(lanes)
    assert set(lanes) <= set(range(LANE_COUNT))
    part = sum(sizes) / LANE_COUNT
    for lane in set(lanes):
        members = [size for size, of in zip(sizes, lanes, strict=True) if of == lane]
        # Only the buckets at its two ends reach beyond a lane's part.
        assert sum(members) <= part + max(members) + 1


def test_a_huge_bucket_gets_a_lane_of_its_own() -> None:
    assert cut_by_bytes([1, 1, 1, 100, 1, 1]) == [0, 0, 0, 3, 5, 5]


def test_a_single_lane_keeps_buckets_and_order() -> None:
    infos = [ParameterInfo(f"p{i}", FUSE_BYTES, "float32", f"m{i}") for i in range(6)]
    plan = make_plan(infos, {f"p{i}": -i for i in range(6)})
    assert [bucket.lane for bucket in plan.buckets] == [0, 1, 2, 3, 4, 5]
    single = single_lane(plan)
    assert {bucket.lane for bucket in single.buckets} == {0}
    assert single.launch_order == plan.launch_order == (5, 4, 3, 2, 1, 0)


def test_tiny_groups_join_the_bucket_before_them() -> None:
    infos = [
        ParameterInfo("conv", 2 * FUSE_BYTES, "float32", "conv"),
        ParameterInfo("norm", TINY_BYTES, "float32", "norm"),
        ParameterInfo("fc", 2 * FUSE_BYTES, "float32", "fc"),
    ]
    plan = make_plan(infos, {"conv": 2, "norm": 1, "fc": 0})
    assert [bucket.names for bucket in plan.buckets] == [("conv", "norm"), ("fc",)]


def test_a_large_models_buckets_are_limited_in_number() -> None:
    """A thousand modules of four megabytes: each is larger than what small models are fused to."""
    infos = [ParameterInfo(f"p{i}", 8 * FUSE_BYTES, "float32", f"m{i}") for i in range(1000)]
    plan = make_plan(infos, {info.name: 0 for info in infos})
    assert FUSE_PARTS <= len(plan.buckets) <= 1.1 * FUSE_PARTS


def test_another_plan_has_another_digest() -> None:
    plan = make_plan([ParameterInfo("p", 4, "float32", "m")], {"p": 0})
    assert plan.digest() != Plan(plan.buckets, ()).digest()
