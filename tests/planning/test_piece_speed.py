"""Simulated: what cutting into pieces buys, and what knobs that are set badly cost."""

from __future__ import annotations

import pytest

from tlsched.planning.fabric import Fabric
from tlsched.planning.plan import BucketPlan, Plan
from tlsched.planning.policies import PolicySettings, Window, make_policy
from tlsched.planning.profile import BucketProfile, Profile
from tlsched.planning.simulate import simulate

MIB = 1024 * 1024
FABRIC = Fabric(hosts=4, rate_bps=1e9)


def _profile(sizes: list[int], weights: list[float]) -> Profile:
    """Forward takes a third of the computing, which takes as long as the communication."""
    compute_s = FABRIC.seconds(sum(sizes))
    whole, before, buckets = sum(weights), 0.0, []
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        ready_s = compute_s * 2 / 3 * (1 - before / whole)
        needed_s = compute_s / 3 * before / whole
        buckets.append(BucketProfile((f"p{index}",), size, ready_s, needed_s))
        before += weight
    return Profile(tuple(buckets), compute_s / 3, compute_s * 2 / 3)


EQUAL = _profile([4 * MIB] * 24, [1.0] * 24)
# One layer holds most of the bytes and computes little.
HUGE = _profile([MIB // 4] * 4 + [MIB] * 4 + [40 * MIB, 7 * MIB, MIB], [2.0] * 8 + [0.2] * 3)


def seconds_of(profile: Profile, name: str, window: Window | None = None) -> float:
    """Of an iteration under the policy ``name``."""
    plan = Plan(
        tuple(BucketPlan(b.names, b.bytes, 0) for b in profile.buckets), profile.launch_order
    )
    settings = PolicySettings(window=window, profile=profile, fabric=FABRIC)
    return simulate(profile, make_policy(name, plan, settings), FABRIC).settled_s


@pytest.mark.parametrize("policy", ["bytescheduler", "prophet"])
@pytest.mark.parametrize("profile", [EQUAL, HUGE], ids=["equal", "huge"])
def test_pieces_by_need_are_faster_than_buckets_as_they_come(policy: str, profile: Profile) -> None:
    floor_s = max(profile.compute_s, FABRIC.seconds(profile.bytes))
    seconds = seconds_of(profile, policy)
    assert floor_s <= seconds < 0.95 * seconds_of(profile, "fifo")


@pytest.mark.parametrize("policy", ["bytescheduler", "prophet"])
def test_vgg_16_gains_by_pieces(policy: str) -> None:
    from tlsched.shapes.catalog import layers_of  # needs torch
    from tlsched.shapes.derive import profile_of_layers

    layers = layers_of("vgg16")
    size = profile_of_layers(layers, compute_s=1.0).bytes
    vgg = profile_of_layers(layers, compute_s=FABRIC.seconds(size))
    assert seconds_of(vgg, policy) < 0.85 * seconds_of(vgg, "fifo")


def test_pieces_too_small_and_credit_too_small_cost() -> None:
    good_s = seconds_of(EQUAL, "bytescheduler", Window(MIB, 2 * MIB))
    assert seconds_of(EQUAL, "bytescheduler", Window(MIB // 32, MIB // 16)) > 1.1 * good_s
    assert seconds_of(EQUAL, "bytescheduler", Window(MIB // 8, MIB // 8)) > 1.02 * seconds_of(
        EQUAL, "bytescheduler", Window(MIB // 8, 2 * MIB)
    )


def test_too_much_credit_is_an_order_of_arrival_again() -> None:
    assert seconds_of(EQUAL, "bytescheduler", Window(MIB, 200 * MIB)) > 1.1 * seconds_of(
        EQUAL, "bytescheduler", Window(MIB, 2 * MIB)
    )
