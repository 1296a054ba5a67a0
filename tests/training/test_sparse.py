"""Sparse gradients: averaged as they are, with DDP's result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.training.compare import Outcome, hold, outcome, trainer
from tests.training.ranks import RankPool


class Words(nn.Module):
    """A sparse embedding, a sparse bag, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8, sparse=True)
        self.bag = nn.EmbeddingBag(30, 8, sparse=True, mode="sum")
        self.out = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor, bag: bool) -> torch.Tensor:
        """The bag is not always used."""
        x = self.embed(words).mean(1)
        result: torch.Tensor = self.out(x + self.bag(words) if bag else x)
        return result


def _sparse(rank: int, _size: int, policy: str, kind: str) -> Outcome:
    torch.manual_seed(3)
    net = Words()
    sparse = [*net.embed.parameters(), *net.bag.parameters()]
    optimizers: list[Any] = (
        [torch.optim.SGD(net.parameters(), lr=0.1)]
        if kind == "sgd"
        else [torch.optim.SparseAdam(sparse, lr=0.1), torch.optim.Adam(net.out.parameters())]
    )
    generator = torch.Generator().manual_seed(rank)
    with trainer(policy, rank, net, optimizers) as t:
        for number in range(8):
            words = torch.randint(0, 30, (4, 6), generator=generator)
            # DDP's reducer cannot take a sparse parameter that is unused on a rank.
            t.forward(words, number % 3 > 0 or policy == "ddp").square().mean().backward()
            t.log.append(net.embed.weight.grad.to_dense())  # type: ignore[union-attr]  # just made
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return outcome(net, t.log)


@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
def test_sparse_gradients(two_ranks: RankPool, kind: str) -> None:
    hold(two_ranks, _sparse, kind, ddp=False)


def _sparse_ddp(rank: int, _size: int, policy: str) -> Outcome:
    torch.manual_seed(3)
    net = Words()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    with trainer(policy, rank, net, optimizer) as t:
        for _ in range(6):
            words = torch.randint(0, 30, (4, 6), generator=generator)
            t.forward(words, True).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net)


def test_sparse_gradients_are_ddps(two_ranks: RankPool) -> None:
    hold(two_ranks, _sparse_ddp)
