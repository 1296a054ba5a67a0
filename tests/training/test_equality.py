"""The result does not depend on the policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tlsched
from tests.training import models
from tests.training.ranks import RankPool
from tlsched.planning.policies import PolicySettings, Window

STEPS = 20


# Small enough that the larger buckets are cut, and not at the end of an element's row.
PIECES = PolicySettings(window=Window(50_000, 120_000))


def _train(rank: int, _size: int, policy: str, optimizer_name: str) -> models.Tensors:
    torch.manual_seed(rank)  # ranks start apart: rank 0's parameters must win
    net = models.small_cnn()
    optimizer = models.OPTIMIZERS[optimizer_name](net)
    loss_of = nn.CrossEntropyLoss()
    with tlsched.schedule(net, optimizer, policy=policy, settings=PIECES):
        for x, y in models.batches("cnn", rank, STEPS):
            loss_of(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return models.parameters(net)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_policy_ends_with_the_same_parameters_on_four_ranks(
    four_ranks: RankPool, optimizer: str
) -> None:
    by_policy = {
        policy: four_ranks.run(_train, policy, optimizer)
        for policy in ("sync", "fifo", "lanes", "kernel")
    }
    for policy, ranks in by_policy.items():
        for of_rank in ranks:
            assert models.identical(of_rank, by_policy["sync"][0]), policy


# prophet cuts once the run has measured what it makes its blocks from.
CUTTING = pytest.mark.parametrize("policy", ["bytescheduler", "prophet"])


@CUTTING
def test_two_ranks_sum_pieces_to_the_same_bits(two_ranks: RankPool, policy: str) -> None:
    sync, cut = (two_ranks.run(_train, name, "adamw") for name in ("sync", policy))
    for ranks in zip(sync, cut, strict=True):
        assert models.identical(*ranks)


@CUTTING
def test_more_ranks_sum_pieces_in_another_order(four_ranks: RankPool, policy: str) -> None:
    """Where in the ring an element's sum begins depends on its place in what is summed."""
    sync, cut = (four_ranks.run(_train, name, "sgd") for name in ("sync", policy))
    assert all(models.identical(of_rank, cut[0]) for of_rank in cut), "ranks diverged"
    for ours, theirs in zip(cut[0], sync[0], strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * scale)
