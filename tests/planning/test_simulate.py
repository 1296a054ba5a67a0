"""The simulator: closed forms, and what holds for every policy on every profile."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.profiles import FABRIC, equal_layers, fabrics, layered, profiles
from tlsched.errors import ConfigError
from tlsched.planning.compare import SIMULATED, expect, floor_s
from tlsched.planning.fabric import Fabric
from tlsched.planning.fusing import plan_on
from tlsched.planning.lateness import Lanes, iteration_s, oracle_s
from tlsched.planning.plan import Plan
from tlsched.planning.policies import POLICIES, Policy, PolicySettings, Send, make_policy
from tlsched.planning.policies.oracle import oracle
from tlsched.planning.profile import BucketProfile, Profile
from tlsched.planning.simulate import Job, simulate, simulate_jobs

NO_START = replace(FABRIC, step_s=0.0)
ONE = layered([10_000_000], [0.1])  # ready at 0.2 s, needed at once
ONE_LINK_S = NO_START.seconds(10_000_000)


def _plan(profile: Profile, lanes: list[int] | None = None) -> Plan:
    return plan_on(profile, lanes or [0] * len(profile.buckets), profile.launch_order)


def _policy(name: str, profile: Profile, fabric: Fabric = FABRIC) -> Policy:
    count = len(profile.buckets)
    plan = _plan(profile, [index * 6 // count for index in range(count)])
    if name == "oracle":
        return oracle(plan)
    return make_policy(name, plan, PolicySettings(profile=profile, fabric=fabric))


def _seconds(name: str, profile: Profile, fabric: Fabric) -> float:
    return simulate(profile, _policy(name, profile, fabric), fabric).settled_s


every_policy = st.sampled_from([*POLICIES, "oracle"])


@settings(deadline=None, max_examples=60)
@given(profiles(), fabrics, every_policy)
def test_no_policy_beats_the_oracle_or_the_floor(
    profile: Profile, fabric: Fabric, name: str
) -> None:
    seconds = _seconds(name, profile, fabric)
    best_s = _seconds("oracle", profile, fabric)
    assert seconds >= best_s * (1 - 1e-6)
    assert best_s >= floor_s(profile, fabric) * (1 - 1e-6)


@settings(deadline=None, max_examples=60)
@given(profiles(), fabrics, st.data())
def test_the_planners_pass_is_the_simulators_kernel(
    profile: Profile, fabric: Fabric, data: st.DataObject
) -> None:
    """On any lanes, in any order: the policy holds back what its lane has not come to."""
    count = len(profile.buckets)
    lanes = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    plan = plan_on(profile, lanes, order)
    simulated = simulate(profile, make_policy("kernel", plan), fabric).iteration_s
    expected = iteration_s(profile, Lanes(tuple(lanes), tuple(order)), fabric)
    # The fluid ends a transfer up to a nanosecond early: what is left then is rounding.
    close = pytest.approx([expected] * len(simulated), rel=1e-6, abs=2e-9 * len(profile.buckets))
    assert simulated == close


@settings(deadline=None, max_examples=30)
@given(profiles(), fabrics)
def test_the_oracle_has_a_closed_pass(profile: Profile, fabric: Fabric) -> None:
    assert oracle_s(profile, fabric) == pytest.approx(
        _seconds("oracle", profile, fabric), rel=1e-6, abs=1e-7
    )


class Watched:
    """A policy, and everything that it handed over."""

    def __init__(self, policy: Policy) -> None:
        self.sends: list[Send] = []
        self.ended: list[Send] = []
        complete, sent = policy.complete, policy.sent

        def watched_complete(bucket: int) -> list[Send]:
            sends = complete(bucket)
            self.sends += sends
            return sends

        def watched_sent(send: Send) -> list[Send]:
            self.ended.append(send)
            sends = sent(send)
            self.sends += sends
            return sends

        policy.complete = watched_complete  # type: ignore[method-assign]  # to look on
        policy.sent = watched_sent  # type: ignore[method-assign]  # to look on


@settings(deadline=None, max_examples=60)
@given(profiles(), every_policy)
def test_every_byte_is_sent_once_and_arrives(profile: Profile, name: str) -> None:
    policy = _policy(name, profile)
    watched = Watched(policy)
    result = simulate(profile, policy, FABRIC, iterations=2)
    assert watched.ended
    assert Counter(watched.sends) == Counter(watched.ended)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for send in watched.sends:
        stop = profile.buckets[send.bucket].bytes if send.stop is None else send.stop
        pieces.setdefault(send.bucket, []).append((send.start, stop))
    for index, bucket in enumerate(profile.buckets):
        covered = sorted(pieces[index])
        assert len(covered) % 2 == 0, "two iterations"
        once = covered[::2]
        assert once == covered[1::2]
        assert once[0][0] == 0
        assert once[-1][1] == bucket.bytes
        assert all(a[1] == b[0] for a, b in itertools.pairwise(once))
    carried = result.link_use * FABRIC.rate_bps / 8 * sum(result.iteration_s)
    assert carried == pytest.approx(2 * profile.bytes * FABRIC.loads[0])


@settings(deadline=None, max_examples=30)
@given(profiles(), st.sampled_from(["sync", "fifo", "lanes", "kernel", "oracle"]), fabrics)
def test_a_faster_link_makes_no_iteration_longer(
    profile: Profile, name: str, fabric: Fabric
) -> None:
    faster = replace(fabric, rate_bps=fabric.rate_bps * 1.5)
    slow_s, fast_s = (_seconds(name, profile, f) for f in (fabric, faster))
    if name in ("sync", "fifo", "oracle"):
        assert fast_s <= slow_s * (1 + 1e-6)
    else:  # with start-up times, lanes may meet less luckily; never by more than those
        assert fast_s <= slow_s * (1 + 1e-6) + len(profile.buckets) * fabric.start_s


@settings(deadline=None, max_examples=30)
@given(profiles())
def test_arrivals_follow_readiness_and_precede_use(profile: Profile) -> None:
    for name in ("kernel", "fifo", "prophet"):
        timeline = simulate(profile, _policy(name, profile), FABRIC).timeline
        for bucket, times in zip(profile.buckets, timeline, strict=True):
            least_s = times.ready_s + FABRIC.start_s + FABRIC.seconds(bucket.bytes)
            assert times.ready_s == pytest.approx(bucket.ready_s, abs=1e-9)
            assert times.sent_s >= least_s * (1 - 1e-6)


def test_one_bucket_alone_is_computing_and_then_sending() -> None:
    assert _seconds("kernel", ONE, NO_START) == pytest.approx(0.3 + ONE_LINK_S)
    with_start = FABRIC.start_s
    assert with_start == pytest.approx(2 * 3 * FABRIC.step_s)
    assert _seconds("fifo", ONE, FABRIC) == pytest.approx(0.3 + ONE_LINK_S + with_start)


def test_a_ring_loads_each_link_with_twice_all_but_one_hosts_share() -> None:
    perfect = Fabric(hosts=4, rate_bps=8e6, efficiency=1.0)
    assert perfect.seconds(1_000_000) == pytest.approx(1.5)
    assert replace(perfect, efficiency=0.5).seconds(1_000_000) == pytest.approx(3.0)


def test_bulk_leaves_a_marked_lane_all_but_its_guaranteed_share() -> None:
    fabric = replace(NO_START, bulk_flows=4, share=0.05)
    assert _seconds("kernel", ONE, fabric) == pytest.approx(0.3 + ONE_LINK_S / 0.95)


def test_bulk_shares_fairly_with_a_lane_without_marks() -> None:
    """A ring's transfer is one connection a link, beside four."""
    fabric = replace(NO_START, bulk_flows=4)
    assert _seconds("fifo", ONE, fabric) == pytest.approx(0.3 + 5 * ONE_LINK_S)


def test_a_rate_that_falls_half_way_doubles_the_rest() -> None:
    half_s = 0.2 + ONE_LINK_S / 2
    fabric = replace(NO_START, rate_changes=((half_s, NO_START.rate_bps / 2),))
    result = simulate(ONE, _policy("kernel", ONE), fabric, iterations=1)
    assert result.settled_s == pytest.approx(0.3 + ONE_LINK_S * 1.5)


def test_everybody_waits_for_the_straggler() -> None:
    fabric = replace(NO_START, compute_factors=(1.0, 1.0, 2.0, 1.0))
    assert _seconds("kernel", ONE, fabric) == pytest.approx(0.6 + ONE_LINK_S)


def test_two_jobs_share_a_link_fairly() -> None:
    jobs = [Job(ONE, _policy("fifo", ONE), 1), Job(ONE, _policy("fifo", ONE), 1)]
    both = simulate_jobs(jobs, NO_START)
    assert [job.settled_s for job in both] == pytest.approx([0.3 + 2 * ONE_LINK_S] * 2)


def test_a_job_that_begins_later_has_the_link_alone() -> None:
    jobs = [Job(ONE, _policy("fifo", ONE), 1), Job(ONE, _policy("fifo", ONE), 1, begin_s=1.0)]
    both = simulate_jobs(jobs, NO_START)
    assert [job.settled_s for job in both] == pytest.approx([0.3 + ONE_LINK_S] * 2)


def test_lanes_of_two_marked_jobs_meet_in_their_bands() -> None:
    """The more urgent lane of one job goes before the other's less urgent one."""
    urgent = make_policy("kernel", _plan(ONE, [0]))
    patient = make_policy("kernel", _plan(ONE, [3]))
    first, second = simulate_jobs([Job(ONE, urgent, 1), Job(ONE, patient, 1)], NO_START)
    assert first.settled_s == pytest.approx(0.3 + ONE_LINK_S)
    assert second.settled_s == pytest.approx(0.3 + 2 * ONE_LINK_S)


def test_one_host_sends_nothing() -> None:
    alone = Fabric(hosts=1, rate_bps=1e9)
    assert _seconds("kernel", ONE, alone) == pytest.approx(0.3, abs=1e-6)


def test_a_plan_of_other_buckets_is_refused() -> None:
    two = equal_layers(2, 1000, 1.0)
    with pytest.raises(ConfigError, match=r"plan has 1 buckets and the profile 2.*profile_of_plan"):
        simulate(two, _policy("fifo", ONE), FABRIC)


@pytest.mark.parametrize(
    "wrong", [{"hosts": 0}, {"rate_bps": 0.0}, {"efficiency": 0.0}, {"efficiency": 1.1}]
)
def test_fabrics_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(FABRIC, **wrong)  # type: ignore[arg-type]  # hosts is whole


def test_every_simulated_policy_is_expected_of_a_profile() -> None:
    profile = equal_layers(12, 1_000_000, 1.0)
    found = expect(profile, FABRIC, SIMULATED)
    assert list(found) == list(SIMULATED)
    best_s = found["oracle"].iteration_s
    assert all(one.iteration_s >= best_s * (1 - 1e-6) for one in found.values())
    assert found["kernel"].iteration_s < found["ddp"].iteration_s
    with pytest.raises(ConfigError, match="no policy 'magic'"):
        expect(profile, FABRIC, ["magic"])


def test_a_training_process_cannot_choose_the_oracle() -> None:
    assert "oracle" not in POLICIES
    with pytest.raises(ConfigError):
        make_policy("oracle", Plan((), ()))


def test_gradients_of_a_bucket_that_arrives_late_stall_forward_there() -> None:
    """Two buckets: the second is needed at 0.05 s and arrives last under fifo's reverse."""
    buckets = (
        BucketProfile(("a",), 1_000_000, 0.1, 0.0),
        BucketProfile(("b",), 5_000_000, 0.1, 0.05),
    )
    profile = Profile(buckets, 0.1, 0.1)
    result = simulate(profile, make_policy("kernel", _plan(profile, [0, 1])), NO_START)
    a_s, b_s = NO_START.seconds(1_000_000), NO_START.seconds(5_000_000)
    assert [times.sent_s for times in result.timeline] == pytest.approx(
        [0.1 + a_s, 0.1 + a_s + b_s]
    )
    assert result.settled_s == pytest.approx(0.1 + a_s + max(0.05, b_s) + 0.05)


@pytest.mark.parametrize(("hosts", "buckets", "most_s"), [(64, 200, 1.0), (1024, 400, 30.0)])
def test_a_large_cluster_is_simulated_soon(hosts: int, buckets: int, most_s: float) -> None:
    """Hosts that all compute at their own speed; processor time, since tests share machines."""
    factors = tuple(1 + host / hosts / 10 for host in range(hosts))
    fabric = Fabric(hosts, 100e9, step_s=1e-6, compute_factors=factors)
    profile = equal_layers(buckets, 4_000_000, 1.0, fabric)
    for name in ("kernel", "oracle"):
        begin_s = time.process_time()
        simulate(profile, _policy(name, profile, fabric), fabric, iterations=1)
        assert time.process_time() - begin_s < most_s
