"""Policies: every bucket is sent once, and inside a lane in the same order on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlsched.errors import ConfigError
from tlsched.planning.plan import BucketPlan, Plan
from tlsched.planning.policies import POLICIES, make_policy


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A few buckets on any lanes, launched in any order."""
    lanes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=20))
    order = draw(st.permutations(range(len(lanes))))
    return Plan(
        tuple(BucketPlan((f"p{i}",), 4, lane) for i, lane in enumerate(lanes)), tuple(order)
    )


# The others' order is rank 0's: see test_pieces.py.
OF_THEIR_OWN = sorted(name for name in POLICIES if not make_policy(name, Plan((), ())).dictated)


@given(plans(), st.sampled_from(OF_THEIR_OWN), st.data())
def test_any_order_of_completion_sends_the_same_sequence_a_lane(
    plan: Plan, name: str, data: st.DataObject
) -> None:
    sequences = []
    for _ in range(2):
        policy = make_policy(name, plan)
        completed = data.draw(st.permutations(range(len(plan.buckets))))
        sent: dict[int, list[int]] = {}
        complete: set[int] = set()
        for bucket in completed:
            complete.add(bucket)
            for send in policy.complete(bucket):
                assert send.bucket in complete, "sent before its gradient was complete"
                sent.setdefault(send.lane, []).append(send.bucket)
        assert sorted(b for lane in sent.values() for b in lane) == sorted(completed)
        sequences.append(sent)
    assert sequences[0] == sequences[1]


@given(plans())
def test_a_new_round_starts_afresh(plan: Plan) -> None:
    policy = make_policy("kernel", plan)
    rounds = []
    for _ in range(2):
        policy.start_round()
        rounds.append([send for bucket in plan.launch_order for send in policy.complete(bucket)])
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == len(plan.buckets)


def test_which_policies_wait_and_which_are_marked() -> None:
    plan = Plan((BucketPlan(("p",), 4, 3),), (0,))
    made = {name: make_policy(name, plan) for name in POLICIES}
    assert {name for name, policy in made.items() if policy.barrier} == {"sync"}
    assert {name for name, policy in made.items() if policy.marked} == {"kernel"}
    assert {name: policy.plan.buckets[0].lane for name, policy in made.items()} == {
        "sync": 0,
        "fifo": 0,
        "bytescheduler": 1,
        "prophet": 1,
        "lanes": 3,
        "kernel": 3,
    }


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no policy .magic.*kernel"):
        make_policy("magic", Plan((), ()))
