"""Loops and modules that no single guard fits: still DDP's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.training import compare
from tests.training.compare import Outcome, hold, listening, outcome, trainer
from tests.training.loops import backward
from tests.training.ranks import RankPool


class Odd(nn.Module):
    """Reads its parameters in every way but by calling its modules in order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.normed = parametrizations.weight_norm(nn.Linear(16, 16))
        self.spectral = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.late = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = 0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """A method that is no forward; reads a child's weight without calling it."""
        return x @ self.first.weight.t() + self.first.bias * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The order changes with each call; one module is first used in the fifth."""
        self.calls += 1
        order = [self.normed, self.spectral]
        if self.calls % 2:
            order.reverse()
        x = self.encode(x)
        for module in order:
            x = torch.tanh(module(x))
        return self.late(x) if self.calls > 4 else x


def _odd(rank: int, _size: int, policy: str, root: bool) -> Outcome:
    torch.manual_seed(3)
    net = Odd()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            backward((t.forward(x) if root else t.net.encode(x)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net)


@pytest.mark.parametrize("root", [True, False], ids=["forward", "part of it"])
def test_parametrizations_other_methods_and_changing_order(two_ranks: RankPool, root: bool) -> None:
    hold(two_ranks, _odd, root, ddp=root)


def _gan(rank: int, _size: int, policy: str, both: bool) -> Outcome:
    torch.manual_seed(3)
    net: Any = nn.ModuleDict(
        {"g": compare.mlp(), "d": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))}
    )
    g = torch.optim.Adam(net["g"].parameters(), lr=1e-2)
    d = torch.optim.SGD(net["d"].parameters(), lr=1e-2, momentum=0.9)
    with trainer(policy, rank, net, [g, d]):
        for number, x in enumerate(compare.data(rank, 12)):
            fake = net["g"](x)
            d.zero_grad()
            real = net["d"](x[:, :4])
            backward((net["d"](fake.detach()) - real).mean())
            d.step()
            if both or number % 3 == 0:
                g.zero_grad()
                backward(-net["d"](fake).mean())
                g.step()
    return outcome(net)


@pytest.mark.parametrize("both", [True, False], ids=["alternating", "one in three"])
def test_two_optimizers_over_one_model_as_a_gan_trains(two_ranks: RankPool, both: bool) -> None:
    hold(two_ranks, _gan, both, ddp=False)


def _siamese(rank: int, _size: int, policy: str) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            a, b, c = t.net(x), t.net(x.flip(0)), t.net(x * 2)
            backward((a - b + 0.5 * c).square().mean())
            regular = sum(p.square().sum() for p in net.parameters())
            backward(0.01 * regular)
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net)


def test_several_forwards_before_a_backward_and_regularisation(two_ranks: RankPool) -> None:
    hold(two_ranks, _siamese, ddp=False)


def _stale(rank: int, _size: int) -> str:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    weight = net[0].weight
    message = "nothing was raised"
    try:
        with trainer("kernel", rank, net, optimizer):
            for number, x in enumerate(compare.data(rank)):
                if number == 5:
                    # A reader that nobody can see: as code in C++ would.
                    with torch._C.DisableTorchFunctionSubclass():
                        loss = (x @ weight.t()).square().mean()
                else:
                    loss = net(x).square().mean()
                backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return message


def test_a_stale_weight_that_nobody_could_see_read_is_never_trained_on(
    two_ranks: RankPool,
) -> None:
    for message in two_ranks.run(_stale):
        assert message.startswith("TrainingError: a forward pass used 0.weight before")


def _says_once(rank: int, _size: int, read: bool) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with listening() as said, trainer("kernel", rank, net, optimizer) as t:
        for x in compare.data(rank, 20):
            for p in net.parameters():
                p.grad = None
            backward(net(x).square().mean())
            optimizer.step()
            if read:
                t.log.append(net[0].weight.sum().item())
        rows = t.run.report()
    return outcome(net, rows, said)


def test_what_is_given_up_is_said_once_and_reported(two_ranks: RankPool) -> None:
    for result in two_ranks.run(_says_once, False):
        assert len(result.said) == 1
        assert "optimizer.zero_grad()" in result.said[0]
        assert result.log[0]["why"] == "needed by forward"
        assert result.log[0]["waited_s"] > 0
    for result in two_ranks.run(_says_once, True):
        assert result.said == []
        assert result.log[0]["why"] == "read outside any forward"
