"""Parameters that take no part in some iterations, accumulate, leave or join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.training import compare
from tests.training.compare import Outcome, hold, listening, outcome, trainer
from tests.training.ranks import RankPool
from tlsched.errors import TrainingError


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
