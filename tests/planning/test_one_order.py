"""One order for all lanes: what groups that are not independent of each other need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_policies import plans
from tlsched.errors import ConfigError
from tlsched.planning.plan import BucketPlan, Plan
from tlsched.planning.policies import POLICIES, Send, in_one_order, make_policy

WHOLE = sorted(name for name in POLICIES if not make_policy(name, Plan((), ())).pieces)


@given(plans(), st.sampled_from(WHOLE), st.data())
def test_whatever_completes_first_the_launch_order_holds_across_lanes(
    plan: Plan, name: str, data: st.DataObject
) -> None:
    policy = in_one_order(make_policy(name, plan))
    for _ in range(2):  # two rounds
        policy.start_round()
        sent: list[Send] = []
        complete: set[int] = set()
        for bucket in data.draw(st.permutations(range(len(plan.buckets)))):
            complete.add(bucket)
            sends = policy.complete(bucket)
            assert {send.bucket for send in sends} <= complete, "sent before it was complete"
            sent += sends
        assert [send.bucket for send in sent] == list(plan.launch_order)
        assert all(send.lane == policy.plan.buckets[send.bucket].lane for send in sent)


@given(plans(), st.data())
def test_nobody_is_held_back_longer_than_the_order_asks(plan: Plan, data: st.DataObject) -> None:
    policy = in_one_order(make_policy("kernel", plan))
    sent: set[int] = set()
    complete: set[int] = set()
    for bucket in data.draw(st.permutations(range(len(plan.buckets)))):
        complete.add(bucket)
        sent |= {send.bucket for send in policy.complete(bucket)}
        ready = next(
            (i for i, b in enumerate(plan.launch_order) if b not in complete), len(plan.buckets)
        )
        assert sent == set(plan.launch_order[:ready])


@pytest.mark.parametrize("name", sorted(set(POLICIES) - set(WHOLE)))
def test_policies_that_hand_over_pieces_have_no_such_order(name: str) -> None:
    with pytest.raises(ConfigError, match=r"pieces.*gloo"):
        in_one_order(make_policy(name, Plan((), ())))


@pytest.mark.parametrize("name", WHOLE)
def test_the_policy_is_otherwise_the_same(name: str) -> None:
    policy = make_policy(name, Plan((BucketPlan(("p",), 4, 3),), (0,)))
    ordered = in_one_order(policy)
    assert (ordered.plan, ordered.barrier, ordered.marked) == (
        policy.plan,
        policy.barrier,
        policy.marked,
    )
    assert ordered.one_order
    assert not policy.one_order
