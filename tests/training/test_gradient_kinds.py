"""Every kind of gradient, parameter and accumulation gives DistributedDataParallel's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tlsched
from tests.training import compare
from tests.training.compare import Outcome, hold, listening, outcome, trainer
from tests.training.ranks import RankPool
from tlsched.errors import TrainingError


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


class Branches(nn.Module):
    """Branch i is used in iteration n if bit i of uses[n] is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        """Sum of the branches in use."""
        x = self.stem(x)
        for bit, branch in enumerate(self.branches):
            if use >> bit & 1:
                x = x + branch(x).tanh()
        return x


def _unused(rank: int, size: int, policy: str, zeros: bool) -> Outcome:
    torch.manual_seed(3)
    net: Any = Branches()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    # Neither rank, one rank, the other, both; first while learning, then later.
    uses = [(3, 3), (1, 3), (1, 1), (3, 1), (5, 2), (0, 0), (0, 4), (7, 7), (2, 5), (1, 1)]
    with trainer(policy, rank, net, optimizer) as t:
        for use, x in zip(uses, compare.data(rank, len(uses)), strict=True):
            t.forward(x, use[rank]).square().mean().backward()
            if policy == "ddp" or not zeros:
                t.log.append([p.grad is None for p in net.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=not zeros)
    return outcome(net, t.log)


@pytest.mark.parametrize("zeros", [False, True], ids=["none", "zeros"])
def test_parameters_unused_on_some_or_all_ranks(two_ranks: RankPool, zeros: bool) -> None:
    if zeros:
        hold(two_ranks, _unused, zeros, ddp=False)
    else:
        hold(two_ranks, _unused, zeros)


def _accumulate(rank: int, _size: int, policy: str, sync: str, use: bool) -> Outcome:
    torch.manual_seed(3)
    net: Any = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with trainer(policy, rank, net, optimizer) as t:
        for step, length in enumerate([1, 3, 2, 4, 3, 1]):
            for number, x in enumerate(compare.data(rank + 10 * step, length)):
                last = number == length - 1
                # With ``use``, a branch that only a micro-batch under no_sync reaches.
                branch = 3 if use and not last and rank == 0 else 1
                if sync == "every" or last:
                    t.forward(x, branch).square().mean().backward()
                else:
                    with t.no_sync():
                        t.forward(x, branch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return outcome(net)


@pytest.mark.parametrize("use", [False, True], ids=["all used", "one unused"])
@pytest.mark.parametrize("sync", ["every", "last"])
def test_accumulation_of_any_length(two_ranks: RankPool, sync: str, use: bool) -> None:
    # DDP loses what only a micro-batch under no_sync reached (pytorch #69031): no reference there.
    hold(two_ranks, _accumulate, sync, use, ddp=not use)


def _no_sync_unused(rank: int, size: int, policy: str) -> Outcome:
    torch.manual_seed(3)
    net: Any = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer(policy, rank, net, optimizer) as t:
        for step in range(5):
            batches = compare.data(rank + 10 * step, 2)
            with t.no_sync():
                t.forward(batches[0], 3 if rank == 0 else 1).square().mean().backward()
            t.forward(batches[1], 1).square().mean().backward()
            grad = net.branches[1].weight.grad
            t.log.append(None if grad is None else grad.clone())
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net, t.log)


def test_what_only_no_sync_reached_is_averaged_with_the_next_backward(two_ranks: RankPool) -> None:
    results = hold(two_ranks, _no_sync_unused, ddp=False)
    for a, b in zip(*(r.log for r in results["kernel"]), strict=True):
        assert torch.equal(a, b)


def _freeze(rank: int, _size: int, policy: str, how: str) -> Outcome:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    if how == "unfreeze":
        net[0].requires_grad_(False)
    groups = list(net[2:].parameters()) if how == "add group" else list(net.parameters())
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    with listening() as said, trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank, 14)):
            if number == 5:
                if how in ("freeze", "both"):
                    net[0].requires_grad_(False)
                elif how == "unfreeze":
                    net[0].requires_grad_(True)
                elif how == "add group":
                    optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.05})
                elif how == "add module":
                    torch.manual_seed(rank)  # rank 0's values must win
                    net.append(nn.Linear(4, 4))
                    optimizer.add_param_group({"params": net[5].parameters()})
            if number == 9 and how == "both":
                net[0].requires_grad_(True)
            t.net(x).square().mean().backward()
            t.log.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net, t.log, [w for w in said if "joined" in str(w.message)])


@pytest.mark.parametrize("how", ["freeze", "both", "unfreeze", "add group", "add module"])
def test_parameters_that_leave_and_join(two_ranks: RankPool, how: str) -> None:
    results = hold(two_ranks, _freeze, how, ddp=False)
    kernel = results["kernel"]
    assert kernel[0].log == kernel[1].log, "the norm was taken before the average"
    said = how in ("unfreeze", "add module")
    assert [len(r.said) for r in kernel] == [said, said]
    if how != "add module":
        reference = two_ranks.run(_alone, how)[0]
        for ours, theirs in zip(kernel[0].parameters, reference.parameters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _alone(_rank: int, size: int, how: str) -> Outcome:
    """The same on one process with all ranks' batches at once."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    if how == "unfreeze":
        net[0].requires_grad_(False)
    groups = list(net[2:].parameters()) if how == "add group" else list(net.parameters())
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    batches = [compare.data(rank, 14) for rank in range(size)]
    for number in range(14):
        if number == 5:
            if how in ("freeze", "both"):
                net[0].requires_grad_(False)
            elif how == "unfreeze":
                net[0].requires_grad_(True)
            elif how == "add group":
                optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.05})
        if number == 9 and how == "both":
            net[0].requires_grad_(True)
        net(torch.cat([b[number] for b in batches])).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(net)


def _refused(rank: int, _size: int, what: Callable[[Any, Any], None]) -> str:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with trainer("kernel", rank, net, optimizer):
            for number, x in enumerate(compare.data(rank, 6)):
                if number == 4 and what is _half:
                    net.bfloat16()
                loss = net(x.to(net[0].weight.dtype)).square().mean()
                loss.backward()
                if number == 4:
                    what(net, optimizer)
                optimizer.step()
                optimizer.zero_grad()
    except TrainingError as error:
        return str(error)
    return "nothing was raised"


def _half(_net: Any, _optimizer: Any) -> None:
    """The model was converted before this iteration."""


def _untrained(net: Any, optimizer: Any) -> None:
    net.register_parameter("extra", nn.Parameter(torch.zeros(3), requires_grad=False))
    net.extra.grad = torch.ones(3)
    optimizer.add_param_group({"params": [net.extra]})


@pytest.mark.parametrize(("what", "name"), [(_half, "0.weight|0.bias"), (_untrained, "extra")])
def test_what_cannot_be_followed_is_refused_by_name(
    two_ranks: RankPool, what: Callable[[Any, Any], None], name: str
) -> None:
    for message in two_ranks.run(_refused, what):
        assert any(part in message for part in name.split("|")), message


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
