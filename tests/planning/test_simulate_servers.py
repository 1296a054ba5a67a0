"""Parameter servers in the simulator: what classical ones cost; nothing beats the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.profiles import equal_layers, layered, profiles
from tlsched.errors import ConfigError
from tlsched.planning.compare import as_trained, expect, floor_s
from tlsched.planning.fabric import Fabric
from tlsched.planning.fusing import plan_on
from tlsched.planning.policies import POLICIES, PolicySettings, make_policy
from tlsched.planning.policies.oracle import oracle
from tlsched.planning.profile import BucketProfile, Profile
from tlsched.planning.simulate import simulate

COLOCATED = Fabric(4, 1e9, step_s=0.0, backend="ps")
DEDICATED = replace(COLOCATED, servers=4)
ONE = layered([10_000_000], [0.1])  # ready 0.2 s after backward began, needed at once
LINK_S = 10_000_000 * 8 / 1e9 / COLOCATED.efficiency

any_servers = st.builds(
    Fabric,
    hosts=st.integers(1, 16),
    rate_bps=st.floats(1e8, 1e11),
    step_s=st.sampled_from([0.0, 150e-6]),
    backend=st.just("ps"),
    servers=st.integers(0, 8),
)


def _iteration_s(name: str, profile: Profile, fabric: Fabric) -> float:
    count = len(profile.buckets)
    lanes = [index * 6 // count for index in range(count)]
    plan = plan_on(profile, lanes, profile.launch_order)
    settings_ = PolicySettings(profile=profile, fabric=fabric)
    policy = oracle(plan) if name == "oracle" else make_policy(name, plan, settings_)
    return simulate(profile, policy, fabric).settled_s


@settings(deadline=None, max_examples=60)
@given(profiles(), any_servers, st.sampled_from([*POLICIES]))
def test_every_policy_ends_and_none_beats_the_oracle(
    profile: Profile, fabric: Fabric, name: str
) -> None:
    best_s = _iteration_s("oracle", profile, fabric)
    assert _iteration_s(name, profile, fabric) >= best_s * (1 - 1e-6)
    assert best_s >= floor_s(profile, fabric) * (1 - 1e-6)


@pytest.mark.parametrize(
    ("fabric", "name", "links"),
    [
        (DEDICATED, "kernel", 1.0),  # pushed and pulled at once, over different links
        (DEDICATED, "sync", 2.0),  # one after the other
        (COLOCATED, "kernel", 1.5),  # three quarters of it both leave and reach a host
        (COLOCATED, "sync", 1.5),  # what is pushed and what is pulled leave by the same link
        (replace(DEDICATED, servers=2), "kernel", 2.0),  # of each server's link
        (replace(DEDICATED, servers=8), "kernel", 1.0),  # of each worker's link
    ],
)
def test_one_bucket_alone(fabric: Fabric, name: str, links: float) -> None:
    assert _iteration_s(name, ONE, fabric) == pytest.approx(0.3 + links * LINK_S, rel=1e-6)


def test_a_classical_server_pulls_one_bucket_while_the_next_is_pushed() -> None:
    count = 10
    profile = layered([1_000_000] * count, [0.0] * count)
    one_s = LINK_S / 10
    assert _iteration_s("sync", profile, DEDICATED) == pytest.approx((count + 1) * one_s, rel=1e-6)


def test_starting_costs_a_step_there_and_a_step_back() -> None:
    slow = replace(DEDICATED, step_s=0.01)
    for name in ("sync", "kernel"):
        more_s = _iteration_s(name, ONE, slow) - _iteration_s(name, ONE, DEDICATED)
        assert more_s == pytest.approx(0.02)


def test_what_is_published_needs_servers_with_links_of_their_own() -> None:
    """One tensor that is the whole model, ready when backward begins and needed last."""
    compute_s = 3.0
    size = int(DEDICATED.rate_bps / 8 * DEDICATED.efficiency * compute_s)
    only = Profile((BucketProfile(("whole",), size, 0.0, 1.0),), 1.0, 2.0)
    gains = {
        fabric.servers: as_trained(only, fabric, "sync").iteration_s
        / as_trained(only, fabric, "kernel").iteration_s
        for fabric in (DEDICATED, COLOCATED)
    }
    assert gains[4] == pytest.approx(7 / 3, rel=1e-3)
    assert gains[0] == pytest.approx((1.5 + 1 / 3) / 1.5, rel=1e-3)


def test_plans_for_servers_are_expected_too() -> None:
    found = expect(equal_layers(24, 1_000_000, 1.0), DEDICATED, ["ddp", "kernel", "oracle"])
    assert found["oracle"].iteration_s <= found["kernel"].iteration_s < found["ddp"].iteration_s


def test_servers_below_none_are_refused() -> None:
    with pytest.raises(ConfigError):
        replace(COLOCATED, servers=-1)
