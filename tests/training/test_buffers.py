"""Buffers follow DistributedDataParallel's rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.training import compare
from tests.training.compare import Outcome, hold, outcome, trainer
from tests.training.ranks import RankPool


class Buffered(nn.Module):
    """BatchNorm, and buffers of other types; one is assigned anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 16) to (rows, 4)."""
        x = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().square().mean(0).double()
        x = self.norm(x)
        result: torch.Tensor = self.last(x + self.mean.float())
        return result


def _buffered(rank: int, _size: int, policy: str, loop: str) -> Outcome:
    torch.manual_seed(3)
    net = Buffered()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer(policy, rank, net, optimizer, **({} if policy == "ddp" else OPTIONS[loop])) as t:
        for number, x in enumerate(compare.data(rank)):
            optimizer.zero_grad()
            if loop == "accumulation":
                with t.no_sync():
                    t.forward(x * 2).square().mean().backward()
            if loop == "two forwards":
                loss = t.forward(x).square().mean() + t.forward(x.flip(1)).square().mean()
            else:
                loss = t.forward(x).square().mean()
            loss.backward()
            optimizer.step()
            t.log.append([b.clone() for b in net.buffers()])
            if loop == "validation" and number % 3 == 1:
                net.eval()  # DDP sends buffers here, we with the next training forward
                with torch.no_grad():
                    t.forward(x)
                net.train()
    return outcome(net, t.log)


OPTIONS: dict[str, dict[str, Any]] = {
    loop: {} for loop in ("plain", "accumulation", "validation", "two forwards")
}


@pytest.mark.parametrize("loop", OPTIONS)
def test_buffers_are_ddps_after_every_step(two_ranks: RankPool, loop: str) -> None:
    # Two forwards: DDP overwrites a buffer that the first graph still needs, and fails.
    hold(two_ranks, _buffered, loop, ddp=loop != "two forwards")


def _local(rank: int, _size: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    net = Buffered()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer("kernel", rank, net, optimizer, broadcast_buffers=False):
        for x in compare.data(rank):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [net.mean]


def test_buffers_stay_local_when_asked_to(two_ranks: RankPool) -> None:
    a, b = two_ranks.run(_local)
    assert not torch.equal(a[0], b[0])


def _one_evaluates(rank: int, _size: int) -> list[torch.Tensor]:
    """Rank 0 evaluates alone, which hangs under DDP."""
    torch.manual_seed(3)
    net = Buffered()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer("kernel", rank, net, optimizer):
        for x in compare.data(rank):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                net.eval()
                net(x)
                net.train()
    return [p.detach().clone() for p in net.parameters()]


def test_one_rank_may_evaluate_alone(two_ranks: RankPool) -> None:
    a, b = two_ranks.run(_one_evaluates)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _sync_batch_norm(rank: int, _size: int) -> str:
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    net = convert(Buffered())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with trainer("kernel", rank, net, optimizer):
            for x in compare.data(rank):
                net(x).square().mean().backward()
                optimizer.step()
    except ValueError as error:
        return str(error)
    return "it ran"


def test_sync_batch_norms_own_error_on_the_cpu_is_the_one_to_see(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_sync_batch_norm):
        assert "SyncBatchNorm" in said
