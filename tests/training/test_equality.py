"""The result does not depend on the policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tlsched
from tests.training import models
from tests.training.ranks import RankPool

STEPS = 20


def _train(rank: int, _size: int, policy: str, optimizer_name: str) -> models.Tensors:
    torch.manual_seed(rank)  # ranks start apart: rank 0's parameters must win
    net = models.small_cnn()
    optimizer = models.OPTIMIZERS[optimizer_name](net)
    loss_of = nn.CrossEntropyLoss()
    with tlsched.schedule(net, optimizer, policy=policy):
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
