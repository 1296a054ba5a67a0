"""What DistributedDataParallel's own tests promise of models, see docs/ddp-parity.md."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import (  # type: ignore[attr-defined]  # private, exported by name
    _apply_optimizer_in_backward,
)

import tlsched
from tests.training import compare
from tests.training.compare import Outcome, hold, outcome, trainer
from tests.training.ddp_adapter import SyncBatchNormOnCpu
from tests.training.ranks import RankPool

SUBSETS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.99), eps=1e-6),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.99), eps=1e-6),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
}


def _subset(rank: int, _size: int, policy: str, name: str, whole: bool) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    parameters = list(net.parameters())
    before = [p.detach().clone() for p in parameters]
    optimizer = SUBSETS[name](parameters if whole else parameters[:1])
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            net.zero_grad()
            t.forward(x).sum().backward()
            optimizer.step()
    same = [torch.equal(old, p.detach()) for old, p in zip(before, parameters, strict=True)]
    assert same == [False, *[not whole] * (len(parameters) - 1)]
    return outcome(net)


@pytest.mark.parametrize("whole", [True, False], ids=["all", "one parameter"])
@pytest.mark.parametrize("name", SUBSETS)
def test_updates_bucket_by_bucket_are_those_of_a_whole_step(
    two_ranks: RankPool, name: str, whole: bool
) -> None:
    hold(two_ranks, _subset, name, whole)


def _in_backward(_rank: int, _size: int) -> str:
    net = compare.mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    try:
        tlsched.schedule(net, torch.optim.SGD(net.parameters(), lr=0.1))
    except tlsched.errors.ModelRefused as error:
        return str(error)
    return ""


def test_an_optimizer_that_runs_inside_backward_is_refused(two_ranks: RankPool) -> None:
    """It would apply this rank's own gradients, before they are averaged."""
    for message in two_ranks.run(_in_backward):
        assert "0.weight" in message


Pair = namedtuple("Pair", ("a", "b"))


class TypedPair(NamedTuple):
    """The other kind."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass
class Wrapped:
    """A class of the user's."""

    a: torch.Tensor
    b: torch.Tensor


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "namedtuple": Pair,
    "typed": TypedPair,
    "class": Wrapped,
}


class Nested(nn.Module):
    """Takes and gives containers, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.given: Any = None

    def forward(self, given: Any, kind: str) -> Any:
        """Two tensors of shape (rows, 16) in a container, to (rows, 4) in nested ones."""
        self.given = given
        if isinstance(given, dict):
            a, b = given["a"], given["b"]
        else:
            a, b = (given.a, given.b) if hasattr(given, "a") else given
        make = CONTAINERS[kind]
        return make(self.inner(a * b), make(self.inner(a), self.inner(b)))


def _total(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.square().mean()
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, Wrapped):
        value = (value.a, value.b)
    return sum(_total(part) for part in value)


def _nested(rank: int, _size: int, policy: str, kind: str) -> Outcome:
    torch.manual_seed(3)
    net = Nested()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            given = CONTAINERS[kind](x, x.flip(0))
            result = t.forward(given, kind)
            assert type(result) is type(given)
            assert policy == "ddp" or net.given is given
            _total(result).backward()
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_pass_unchanged_in_and_out(two_ranks: RankPool, kind: str) -> None:
    hold(two_ranks, _nested, kind, ddp=kind != "class")  # DDP does not look into a class


class TwoLayers(nn.Module):
    """The second is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        """Shape in, shape out."""
        x = self.first(x).relu()
        result: torch.Tensor = self.second(x) if second else x
        return result


def _control_flow(rank: int, _size: int, policy: str, where: str) -> Outcome:
    torch.manual_seed(3)
    net = TwoLayers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    used = {"both": (0, 1), "one": (1,), "none": ()}[where]
    with trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            t.forward(x, number % 2 == 1 and rank in used).square().mean().backward()
            t.log.append([p.grad is not None for p in net.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    assert t.log == [[True, number % 2 == 1 and bool(used)] for number in range(len(t.log))]
    return outcome(net, t.log)


@pytest.mark.parametrize("where", ["both", "one", "none"])
def test_control_flow_tells_who_was_used_on_any_rank(two_ranks: RankPool, where: str) -> None:
    hold(two_ranks, _control_flow, where)


class TwoResults(nn.Module):
    """The second result is hidden in an object of the user's, where DDP does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        """Shape (rows, 16) to twice (rows, 4)."""
        return self.first(x), Wrapped(self.second(x), x)


def _half_used(rank: int, _size: int, policy: str) -> Outcome:
    torch.manual_seed(3)
    net = TwoResults()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            first, rest = t.forward(x)
            loss = first.square().mean()
            if rank == 1:
                loss = loss + rest.a.square().mean()
            local = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
            first, rest = t.forward(x)
            loss = first.square().mean()
            if rank == 1:
                loss = loss + rest.a.square().mean()
            loss.backward()
            for p, own in zip(net.parameters(), local, strict=True):
                average = torch.zeros_like(p) if own is None else own.clone()
                dist.all_reduce(average)
                assert p.grad is not None
                torch.testing.assert_close(p.grad.clone(), average / 2)
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net)


def test_a_result_that_one_rank_leaves_out_of_its_loss_counts_as_zero(two_ranks: RankPool) -> None:
    hold(two_ranks, _half_used, ddp=False)  # DDP ends with an error


def _evaluates_alone(rank: int, _size: int) -> list[Any]:
    torch.manual_seed(3)
    net: Any = nn.Sequential(nn.Linear(16, 4), SyncBatchNormOnCpu(4, track_running_stats=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with trainer("kernel", rank, net, optimizer):
        for x in compare.data(rank):
            net(x).pow(3).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                net.eval()
                loss = net(x).square().mean()
                losses.append(torch.autograd.grad(loss, net[0].weight)[0])
                net.train()
    return [p.detach() for p in net.parameters()]


def test_synchronised_batch_norm_is_silent_in_evaluation(two_ranks: RankPool) -> None:
    a, b = two_ranks.run(_evaluates_alone)
    assert all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(a, b, strict=True))
