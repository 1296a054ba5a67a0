"""The results are DDP's, and do not depend on the policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tlsched
from tests.training.models import (
    OPTIMIZERS,
    Tensors,
    identical,
    image_batches,
    parameters,
    small_cnn,
)
from tests.training.ranks import RankPool

STEPS = 20


def _train(rank: int, _size: int, policy: str, optimizer_name: str) -> Tensors:
    torch.manual_seed(rank)  # ranks start apart: rank 0's parameters must win
    net = small_cnn()
    optimizer = OPTIMIZERS[optimizer_name](net)
    loss_of = nn.CrossEntropyLoss()

    def loop(forward: nn.Module) -> None:
        for x, y in image_batches(rank, STEPS):
            loss_of(forward(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    if policy == "ddp":
        loop(DistributedDataParallel(net))
    else:
        with tlsched.schedule(net, optimizer, policy=policy):
            loop(net)
    return parameters(net)


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
            assert identical(of_rank, by_policy["sync"][0]), policy


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_ranks_end_with_ddps_parameters(two_ranks: RankPool, optimizer: str) -> None:
    ours = two_ranks.run(_train, "kernel", optimizer)[0]
    ddps = two_ranks.run(_train, "ddp", optimizer)[0]
    for mine, theirs in zip(ours, ddps, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
