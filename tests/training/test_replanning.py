"""Lanes chosen anew from what was measured: on all ranks at one step, with the same results."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import tlsched
from tests.training import compare, models
from tests.training.faulty import deep_net, step
from tests.training.ranks import RankPool
from tlsched.planning.lateness import Lanes
from tlsched.planning.profile import Profile, load_profile
from tlsched.shim import replanning
from tlsched.shim.profiling import measured_profile, seconds_a_byte
from tlsched.shim.trace import Iteration

STEPS = 16


def _train(
    rank: int, _size: int, policy: str, period: int
) -> tuple[Any, list[Any], Profile | None]:
    """Parameters, the plans that were in force, and the profile. Lanes change with each plan."""
    turns = itertools.count()

    def other_lanes(profile: Profile, fabric: Any, **options: Any) -> Lanes:
        """Others each time: what would be chosen may be what was there."""
        turn = next(turns)
        lanes = tuple((number + turn) % 6 for number in range(len(profile.buckets)))
        return Lanes(lanes, profile.launch_order)

    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    plans: list[Any] = []
    always = patch.multiple(replanning, choose_lanes=other_lanes, PERIOD=period, MOVED=-1.0)
    with always, tlsched.schedule(net, optimizer, policy=policy, timeout_s=30) as run:
        was_learning = True
        lanes_before: list[int] = []
        for batch in models.batches("mlp", rank, STEPS):
            step(net, optimizer, batch)
            if not was_learning:  # what is under way keeps its lane, whatever the new plan says
                assert [row["lane"] for row in run.report()] == lanes_before
            was_learning = run.learning
            lanes_before = [bucket.lane for bucket in run.plan.buckets]
            lanes = tuple(bucket.lane for bucket in run.plan.buckets)
            if not run.learning and (not plans or plans[-1] != lanes):
                plans.append(lanes)
        profile = run.profile
    return models.parameters(net), plans, profile


def test_lanes_follow_the_measured_profile_with_the_same_results(two_ranks: RankPool) -> None:
    expected = two_ranks.run(_train, "sync", 200)
    outcomes = two_ranks.run(_train, "kernel", 1)
    for (parameters, _, nothing), (replanned, plans, profile) in zip(
        expected, outcomes, strict=True
    ):
        assert models.identical(parameters, replanned)
        assert nothing is None
        assert profile is not None
        assert len(plans) >= 3, plans
    assert outcomes[0][1:] == outcomes[1][1:], "ranks went by different plans or profiles"


def _train_with_a_hook(rank: int, _size: int) -> models.Tensors:
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if rank == 0:
        optimizer.register_step_post_hook(lambda *_: None)
    with (
        compare.listening(),
        tlsched.schedule(net, optimizer, timeout_s=10, trace=rank == 1),
    ):
        for batch in models.batches("mlp", rank, STEPS):
            step(net, optimizer, batch)
        return models.parameters(net)


def test_a_rank_that_waits_in_step_still_meets_the_others(two_ranks: RankPool) -> None:
    """A step post-hook on rank 0 only, as loggers put it there."""
    first, second = two_ranks.run(_train_with_a_hook)
    assert models.identical(first, second)


def test_a_profile_is_saved_and_read_back(two_ranks: RankPool, tmp_path: Path) -> None:
    _, _, profile = two_ranks.run(_train, "kernel", 200)[0]
    assert profile is not None
    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    assert profile.bytes >= sum(p.numel() * 4 for p in deep_net().parameters())
    ready = [bucket.ready_s for bucket in profile.buckets]
    assert ready == sorted(ready, reverse=True)


class _Sized:
    def __init__(self, name: str, size: int) -> None:
        self.names, self.bytes, self.kind = (name,), size, "any"


def test_waits_are_taken_out_of_the_profile() -> None:
    one = Iteration(
        start_s=10.0,
        needed_s={0: 10.5, 1: 13.0},
        waited_s={0: 0.0, 1: 2.0},  # the first one's gradient came two seconds late
        ready_s={1: 15.0, 0: 17.0},
        launched_s={1: 15.0, 0: 17.0},
        sent_s={1: 16.5, 0: 19.0},
        began_s=14.5,
        ended_s=17.5,
        backwards=1,
        all_waited_s=3.0,
    )
    buckets: Any = [_Sized("a", 40), _Sized("b", 10)]
    profile = measured_profile([one], buckets)
    assert profile is not None
    assert [b.needed_s for b in profile.buckets] == [0.5, 1.0]
    assert [b.ready_s for b in profile.buckets] == [2.5, 0.5]
    assert (profile.forward_s, profile.backward_s) == (1.5, 3.0)
    assert seconds_a_byte([one], buckets) == 3.5 / 50
    one.backwards = 2
    assert measured_profile([one], buckets) is None
