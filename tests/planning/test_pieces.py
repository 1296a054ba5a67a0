"""Policies that hand over pieces: every byte once, one order on all ranks, within the credit."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlsched.errors import ConfigError
from tlsched.planning.fabric import Fabric
from tlsched.planning.plan import BucketPlan, Plan
from tlsched.planning.policies import PolicySettings, Send, Window, make_policy
from tlsched.planning.policies.bytescheduler import ByteScheduler, Following
from tlsched.planning.policies.prophet import blocks
from tlsched.planning.policies.settings import ALIGN_BYTES
from tlsched.planning.profile import BucketProfile, Profile

sizes = st.lists(st.integers(0, 1000), min_size=1, max_size=8)
windows = st.builds(Window, st.integers(ALIGN_BYTES, 600), st.integers(1, 1500))
# Not drawn move by move: an interleaving has a hundred of them.
seeds = st.randoms(use_true_random=False)


def _plan(of_bytes: list[int]) -> Plan:
    buckets = tuple(BucketPlan((f"p{i}",), size, 0) for i, size in enumerate(of_bytes))
    return Plan(buckets, tuple(reversed(range(len(buckets)))))


def _size(plan: Plan, send: Send) -> int:
    stop = plan.buckets[send.bucket].bytes if send.stop is None else send.stop
    return stop - send.start


def _every_byte_once(plan: Plan, sends: list[Send]) -> None:
    reached = [0] * len(plan.buckets)
    whole = [False] * len(plan.buckets)
    for send in sends:
        assert send.start == reached[send.bucket]
        assert not whole[send.bucket]
        assert send.start % ALIGN_BYTES == 0
        whole[send.bucket] = send.stop is None
        reached[send.bucket] += _size(plan, send)
    assert reached == [bucket.bytes for bucket in plan.buckets]
    assert all(whole)


@settings(deadline=None)
@given(sizes, windows, seeds)
def test_all_ranks_hand_over_rank_0s_order_whatever_is_ready_first(
    of_bytes: list[int], window: Window, random: Random
) -> None:
    """Three ranks; a collective ends when all have handed it over, in any interleaving."""
    plan = _plan(of_bytes)
    leader = ByteScheduler(plan, window)
    followers = [Following(plan), Following(plan)]
    handed: list[list[Send]] = [[], [], []]
    orders: list[deque[Send]] = [deque(), deque()]
    left = [random.sample(range(len(of_bytes)), len(of_bytes)) for _ in range(3)]
    ended = 0

    def lead(sends: list[Send]) -> None:
        handed[0].extend(sends)
        for queue in orders:
            queue.extend(sends)
        on_its_way = handed[0][ended:]
        assert len(on_its_way) <= 1 or (
            sum(_size(plan, send) for send in on_its_way) <= window.credit_bytes
        )

    while True:
        moves = [("complete", rank) for rank in range(3) if left[rank]]
        moves += [("order", rank) for rank in (1, 2) if orders[rank - 1]]
        if ended < min(map(len, handed)):
            moves.append(("end", 0))
        if not moves:
            break
        move, rank = random.choice(moves)
        if move == "end":
            send, ended = handed[0][ended], ended + 1
            lead(leader.sent(send))
        elif move == "order":
            bucket = orders[rank - 1].popleft().bucket
            handed[rank] += followers[rank - 1].told(window.partition_bytes, [bucket])
        elif rank == 0:
            lead(leader.complete(left[0].pop()))
        else:
            handed[rank] += followers[rank - 1].complete(left[rank].pop())
        assert all(theirs == handed[0][: len(theirs)] for theirs in handed[1:])
    assert handed[1] == handed[2] == handed[0]
    _every_byte_once(plan, handed[0])


def test_the_most_urgent_piece_overtakes_and_credit_bounds_what_it_waits_for() -> None:
    policy = ByteScheduler(_plan([100, 1000]), Window(128, 256))
    assert [s.start for s in policy.complete(1)] == [0, 128]
    assert policy.complete(0) == []
    sends = policy.sent(Send(1, 1, 0, 128))
    assert [send.bucket for send in sends] == [0]


def test_another_window_really_cuts_other_pieces_from_the_next_round_on() -> None:
    policy = ByteScheduler(_plan([1000]), Window(256, 10_000))
    policy.use(Window(512, 10_000))
    assert [s.stop for s in policy.complete(0)] == [256, 512, 768, None]
    policy.start_round()
    assert [s.stop for s in policy.complete(0)] == [512, None]
    follower = Following(_plan([1000]))
    follower.complete(0)
    assert [s.stop for s in follower.told(512, [0, 0])] == [512, None]


@pytest.mark.parametrize("window", [(ALIGN_BYTES - 1, 100), (ALIGN_BYTES, 0)])
def test_windows_that_cannot_be(window: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        Window(*window)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Buckets that are ready in any order and in steps."""
    of_bytes = draw(sizes)
    ready = [draw(st.integers(0, 10)) / 10 for _ in of_bytes]
    return Profile(
        tuple(
            BucketProfile((f"p{i}",), size, at_s, 0.0)
            for i, (size, at_s) in enumerate(zip(of_bytes, ready, strict=True))
        ),
        forward_s=0.5,
        backward_s=1.0,
    )


fabrics = st.builds(
    Fabric,
    hosts=st.integers(1, 4),
    rate_bps=st.floats(1e3, 1e7),
    step_s=st.sampled_from([0.0, 1e-4, 1e-2]),
)


@given(profiles(), fabrics, st.data())
def test_blocks_hold_every_byte_and_their_order_is_the_one_of_all_ranks(
    profile: Profile, fabric: Fabric, data: st.DataObject
) -> None:
    plan = _plan([bucket.bytes for bucket in profile.buckets])
    known = PolicySettings(profile=profile, fabric=fabric)
    orders = []
    for _ in range(2):
        policy = make_policy("prophet", plan, known)
        complete: set[int] = set()
        sends: list[Send] = []
        for bucket in data.draw(st.permutations(range(len(plan.buckets)))):
            complete.add(bucket)
            new = policy.complete(bucket)
            assert {send.bucket for send in new} <= complete
            sends += new
        orders.append(sends)
    assert orders[0] == orders[1]
    _every_byte_once(plan, orders[0])


@given(profiles(), fabrics)
def test_no_block_delays_a_more_urgent_gradient_by_more_than_the_least_part(
    profile: Profile, fabric: Fabric
) -> None:
    ends_s = 0.0
    for block in blocks(profile, fabric):
        assert block.start_s >= ends_s - 1e-9
        ends_s = block.stop_s
        due_s = min(
            (
                bucket.ready_s
                for index, bucket in enumerate(profile.buckets)
                if bucket.ready_s > block.start_s and index < max(s.bucket for s in block.sends)
            ),
            default=float("inf"),
        )
        least_s = 11 * fabric.start_s + fabric.seconds(ALIGN_BYTES)
        assert block.stop_s <= max(due_s, block.start_s + least_s) + 1e-9


def test_blocks_of_a_stepwise_profile() -> None:
    """Two buckets ready at 0, two more 1 s later; what does not fit between waits for the end."""
    ready = [1.0, 1.0, 0.0, 0.0]
    profile = Profile(
        tuple(BucketProfile((f"p{i}",), 64_000, at_s, 0.0) for i, at_s in enumerate(ready)),
        forward_s=1.0,
        backward_s=1.0,
    )
    # One host's load is 2 (n-1)/n of the bytes, and Ethernet's share: 96 kB can leave in a second.
    rate_bps = Fabric(2, 1.0).loads[0] * 8 * 96_000
    made = blocks(profile, Fabric(2, rate_bps, step_s=0.0))
    assert [[(s.bucket, s.start, s.stop) for s in block.sends] for block in made] == [
        [(2, 0, None), (3, 0, 32_000)],
        [(0, 0, None), (1, 0, None), (3, 32_000, None)],
    ]
    assert made[0].stop_s == pytest.approx(1.0)


def test_prophet_without_a_profile_sends_whole_buckets_as_they_come() -> None:
    plan = _plan([10, 20, 30])
    policy = make_policy("prophet", plan)
    assert policy.complete(1) == []
    assert policy.complete(2) == [Send(2, 1), Send(1, 1)]


def test_a_profile_of_another_plan_is_refused() -> None:
    profile = Profile((BucketProfile(("q0",), 11, 0.0, 0.0),), 1.0, 1.0)
    with pytest.raises(ConfigError, match="other buckets"):
        make_policy("prophet", _plan([11]), PolicySettings(profile=profile, fabric=Fabric(2, 1e9)))
