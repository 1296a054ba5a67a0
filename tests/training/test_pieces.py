"""Pieces in real training: which are sent, on which ranks, and what happens when a rank fails."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tlsched
from tests.training import models
from tests.training.faulty import MARGIN_S, SOON_S, train_with_faults
from tests.training.ranks import RankPool, fresh_ranks
from tests.training.test_faults import TIMEOUT_S, _die, _raise, _sleep_long
from tlsched.errors import TrainingError
from tlsched.planning.fabric import Fabric
from tlsched.planning.policies import PolicySettings, Window
from tlsched.planning.profile import BucketProfile, Profile
from tlsched.planning.tuning import Tuning
from tlsched.shim.lanes import Lane

STEPS = 8


class _Two:
    """Two windows in turn, to see that a window reaches what is sent."""

    def __init__(self) -> None:
        self._sizes = [400_000, 40_000]

    def next(self) -> Window:
        return Window(self._sizes.pop(0), 800_000)

    def tell(self, window: Window, seconds: float) -> None:
        assert seconds > 0


def _wide() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(32, 800), nn.BatchNorm1d(800), nn.Linear(800, 300))


def _loop(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        net(torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _sizes_on_lane_1(rank: int, _size: int) -> list[list[int]]:
    """Bytes of each all-reduce, one list a backward, under two windows."""
    rounds: list[list[int]] = []
    start = Lane.all_reduce

    def seen(self: Lane, flat: torch.Tensor) -> Any:
        if self.index == 1:
            rounds[-1].append(flat.numel() * flat.element_size())
        return start(self, flat)

    Lane.all_reduce = seen  # type: ignore[method-assign]  # given back below
    try:
        net = _wide()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with tlsched.schedule(net, optimizer, policy="bytescheduler") as run:
            if run._orders is not None and rank == 0:
                run._orders.tuning = Tuning(_Two(), trials=2, rounds_a_trial=1)  # type: ignore[union-attr]  # rank 0's
            for _ in range(STEPS):
                rounds.append([])
                _loop(net, optimizer, rank, 1)
                run.flush()
    finally:
        Lane.all_reduce = start  # type: ignore[method-assign]
    return rounds


def test_the_tuned_window_reaches_what_is_sent_on_all_ranks_at_once(two_ranks: RankPool) -> None:
    ours, theirs = two_ranks.run(_sizes_on_lane_1)
    assert ours == theirs, "the same pieces in the same order"
    overlapped = ours[2:]
    assert max(overlapped[0]) >= 400_000 - 64
    assert max(overlapped[3]) <= 40_000 + 8_000  # a last piece has the flags and padding as well
    assert len({sum(sizes) for sizes in overlapped}) == 1, "every byte, whatever the pieces"


def _prophet(rank: int, _size: int) -> tuple[models.Tensors, int]:
    """Blocks that cut the large buckets, from a profile of the plan that a first run makes."""
    net = _wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tlsched.schedule(net, optimizer, policy="prophet") as run:
        _loop(net, optimizer, rank, 3)
        buckets = run.plan.buckets
    profile = Profile(
        tuple(BucketProfile(b.names, b.bytes, 0.1 - 0.01 * i, 0.0) for i, b in enumerate(buckets)),
        forward_s=0.1,
        backward_s=0.1,
    )
    settings = PolicySettings(profile=profile, fabric=Fabric(2, 1e8, step_s=1e-5))
    net = _wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tlsched.schedule(net, optimizer, policy="prophet", settings=settings) as run:
        _loop(net, optimizer, rank, STEPS)
        count = len(run._opened().gradients.policy._sends)  # type: ignore[attr-defined]  # prophet's
        run.flush()
    return [*models.parameters(net), torch.tensor(count - len(buckets))], count


def _synchronous(rank: int, _size: int) -> models.Tensors:
    net = _wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tlsched.schedule(net, optimizer, policy="sync"):
        _loop(net, optimizer, rank, STEPS)
    return models.parameters(net)


def test_blocks_of_a_profile_average_as_sync_does(two_ranks: RankPool) -> None:
    expected = two_ranks.run(_synchronous)
    for (parameters, _), theirs in zip(two_ranks.run(_prophet), expected, strict=True):
        *parameters, more = parameters
        assert int(more) > 0, "a bucket is cut"
        assert models.identical(parameters, theirs)


def _reads_within_backward(rank: int, _size: int) -> str:
    net = _wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    parameters = dict(net.named_parameters())
    first, last = parameters["0.weight"], parameters["2.weight"]
    try:
        with tlsched.schedule(net, optimizer, policy="bytescheduler", timeout_s=20):
            _loop(net, optimizer, rank, 3)
            first.register_hook(lambda gradient: last.grad.sum() * gradient)  # type: ignore[union-attr,no-untyped-call]  # torch
            _loop(net, optimizer, rank, 1)
    except TrainingError as error:
        return str(error)
    return ""


def test_reading_an_average_within_backward_is_refused_at_once(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_reads_within_backward):
        assert "in the middle of backward" in message


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_is_named_by_leader_and_followers(victim: int) -> None:
    with fresh_ranks(3) as pool:
        outcomes = pool.run(train_with_faults, {victim: _die}, "bytescheduler", dying=1)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error == "CommunicationError"
        assert f"rank {victim} left" in outcomes[rank].message
        assert outcomes[rank].seconds < MARGIN_S


@pytest.mark.parametrize("policy", ["bytescheduler", "prophet"])
def test_exception_on_one_rank_is_told_by_the_others(four_ranks: RankPool, policy: str) -> None:
    outcomes = four_ranks.run(train_with_faults, {0: _raise}, policy)
    assert outcomes[0].error == "ValueError"
    assert outcomes[0].seconds < SOON_S
    for rank in (1, 2, 3):
        assert outcomes[rank].error == "CommunicationError"
        assert "rank 0 left: ValueError: a bad batch" in outcomes[rank].message
        assert outcomes[rank].threads <= 0


@pytest.mark.parametrize("silent", [0])
def test_rank_that_keeps_silent_is_named_after_the_timeout(
    four_ranks: RankPool, silent: int
) -> None:
    outcomes = four_ranks.run(train_with_faults, {silent: _sleep_long}, "bytescheduler", TIMEOUT_S)
    for rank in {0, 1, 2, 3} - {silent}:
        assert outcomes[rank].error == "CommunicationError"
        assert f"rank {silent} did not answer within 4 s" in outcomes[rank].message
        assert outcomes[rank].seconds < TIMEOUT_S + MARGIN_S


def _leftovers(rank: int, _size: int, policy: str) -> tuple[int, int]:
    """File descriptors and threads more than before, after several contexts."""
    import threading

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    found = []
    for _ in range(3):
        net = _wide()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="tlsched: the kernel does not order")
            with tlsched.schedule(net, optimizer, policy=policy):
                _loop(net, optimizer, rank, 4)
        found.append(count())
    return found[2][0] - found[1][0], found[2][1] - found[1][1]


@pytest.mark.parametrize("policy", ["bytescheduler", "prophet"])
def test_nothing_is_left_behind(two_ranks: RankPool, policy: str) -> None:
    for descriptors, threads in two_ranks.run(_leftovers, policy):
        assert descriptors <= 0  # less where what an earlier test left is closed meanwhile
        assert threads <= 0
