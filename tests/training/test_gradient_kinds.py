"""Every kind of gradient, parameter and accumulation gives DistributedDataParallel's result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tlsched
from tests.training import compare
from tests.training.compare import Outcome, hold, outcome, trainer
from tests.training.ranks import RankPool


class Shapes(nn.Module):
    """A scalar, an empty parameter, gaps, another order of dimensions, and two types."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.gaps = nn.Parameter(torch.randn(16, 16)[:, ::2])
        self.turned = nn.Parameter(torch.randn(16, 8).t())
        self.expanded = nn.Parameter(torch.randn(8, 1))
        self.twice = nn.Parameter(torch.randn(8, 3, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(8, 3).to(torch.bfloat16))
        self.phase = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of them, in double."""
        y = (x @ self.gaps + x @ self.turned.t()) * self.scalar + self.expanded.t()
        y = torch.cat([y, self.empty.sum(0).expand(len(y), 4)[:, :0]], 1)
        z = y.double() @ self.twice + (y.to(torch.bfloat16) @ self.short).double()
        return z + (y.to(torch.complex64) @ self.phase).abs().double()


def _shapes(rank: int, _size: int, policy: str, none: bool) -> Outcome:
    torch.manual_seed(3)
    net = Shapes()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            t.forward(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)
    return outcome(net)


@pytest.mark.parametrize("none", [True, False], ids=["none", "zeros"])
def test_shapes_strides_and_types_in_one_model(two_ranks: RankPool, none: bool) -> None:
    # DDP keeps no strides of its own for gaps; bfloat16 rounds where the order of adding differs.
    hold(two_ranks, _shapes, none, rtol=1e-5)


def _typed(rank: int, size: int, policy: str, dtype: torch.dtype) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            t.forward(x.to(dtype)).abs().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128],
    ids=str,
)
def test_every_floating_type(two_ranks: RankPool, dtype: torch.dtype) -> None:
    hold(two_ranks, _typed, dtype, ddp=dtype is not torch.complex128)


def _against_double(rank: int, size: int, dtype: torch.dtype) -> float:
    """The average that we give, against the one computed in float64 from all ranks' gradients."""
    torch.manual_seed(3)
    net = nn.Linear(64, 64, bias=False).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    worst = 0.0
    with tlsched.schedule(net, optimizer):
        for step in range(4):
            batches = [compare.data(r, 4, 8, 64)[step].to(dtype) for r in range(size)]
            net(batches[rank]).square().sum().backward()
            ours = net.weight.grad.double()  # type: ignore[union-attr]  # backward made it
            total = torch.zeros(64, 64, dtype=torch.float64)
            for x in batches:
                total += torch.autograd.grad(net(x).square().sum(), net.weight)[0].double()
            error = (ours - total / size).abs().max() / total.abs().max()
            worst = max(worst, float(error))
            optimizer.step()
            optimizer.zero_grad()
    return worst


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)],
    ids=str,
)
def test_averages_against_float64(two_ranks: RankPool, dtype: torch.dtype, limit: float) -> None:
    assert max(two_ranks.run(_against_double, dtype)) < limit


def _channels_last(rank: int, _size: int, policy: str) -> Outcome:
    torch.manual_seed(3)
    net: Any = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank, rows=2, width=4 * 36):
            image = x.view(2, 4, 6, 6).to(memory_format=torch.channels_last)
            t.forward(image).square().mean().backward()
            if policy != "ddp":
                assert net[0].weight.grad.stride() == net[0].weight.stride()
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net)


def test_channels_last(two_ranks: RankPool) -> None:
    hold(two_ranks, _channels_last)
