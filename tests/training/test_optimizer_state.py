"""What an optimizer shows and does besides its update: state, hooks, closures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.hooks import RemovableHandle

import tlsched
from tests.training import compare
from tests.training.compare import Outcome, Wide, hold, outcome, trainer
from tests.training.ranks import RankPool


def _state_read(rank: int, _size: int, policy: str, how: str) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            optimizer.zero_grad()
            t.forward(x).square().mean().backward()
            optimizer.step()
            if number % 4 != 3:
                continue
            if how == "state":
                t.log.append([optimizer.state[p]["exp_avg"].clone() for p in net.parameters()])
            elif how == "state_dict":
                t.log.append(
                    [s["exp_avg"].clone() for s in optimizer.state_dict()["state"].values()]
                )
            elif how == "copy":
                other = copy.deepcopy(optimizer)
                t.log.append([s["exp_avg"].clone() for s in other.state.values()])
            elif how == "reset":
                optimizer.state.clear()
            elif how == "change":
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
            elif how == "lr":
                optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    return outcome(net, t.log)


@pytest.mark.parametrize("how", ["state", "state_dict", "copy", "reset", "change", "lr"])
def test_the_optimizers_state_is_up_to_date_for_whoever_reads_it(
    two_ranks: RankPool, how: str
) -> None:
    hold(two_ranks, _state_read, how)


def _step_hooks(rank: int, _size: int, policy: str) -> Outcome:
    torch.manual_seed(3)
    net = Wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    calls: list[Any] = []
    handles: list[RemovableHandle] = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(
            lambda o, *_: calls.append(o.param_groups[0]["params"][0].sum().item())
        ),
    ]
    with trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            if number == 6:
                for handle in handles:
                    handle.remove()
            optimizer.zero_grad()
            t.forward(x).square().mean().backward()
            optimizer.step()
    return outcome(net, calls)


def test_step_hooks_run_once_a_step(two_ranks: RankPool) -> None:
    results = hold(two_ranks, _step_hooks)
    assert results["kernel"][0].log.count("pre") == 6


def _closure(rank: int, _size: int, policy: str, keyword: bool) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = t.forward(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return loss

            result = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            t.log.append(result.item())
    return outcome(net, t.log)


@pytest.mark.parametrize("keyword", [False, True])
def test_step_takes_a_closure(two_ranks: RankPool, keyword: bool) -> None:
    hold(two_ranks, _closure, keyword)


def _two_models(rank: int, _size: int, policy: str) -> Outcome:
    """One optimizer over two models, each in a context of its own; and a loss's own parameter."""
    torch.manual_seed(3)
    a, b = compare.mlp(), compare.mlp(4)
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters()], lr=1e-2)
    with (
        trainer(policy, rank, a, optimizer) as first,
        trainer(policy, rank, b, optimizer) as second,
    ):
        for x in compare.data(rank):
            optimizer.zero_grad()
            second.forward(first.forward(x)).square().mean().backward()
            optimizer.step()
    return outcome(nn.ModuleList([a, b]))


def test_one_optimizer_over_two_models(two_ranks: RankPool) -> None:
    hold(two_ranks, _two_models)


def _loop_ends_as_it_began(rank: int, _size: int) -> list[Any]:
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1)
    before = optimizer.__dict__["step"]
    with tlsched.schedule(net, optimizer):
        for x in compare.data(rank, 4):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            schedule.step()
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules()]
    return [
        optimizer.__dict__["step"] is before,
        sum(hooks),
        {type(p).__name__ for p in net.parameters()},
        {type(p.grad).__name__ for p in net.parameters()},
        "state" in vars(type(optimizer).__mro__[-2]),
    ]


def test_the_context_leaves_model_and_optimizer_as_they_were(two_ranks: RankPool) -> None:
    for left in two_ranks.run(_loop_ends_as_it_began):
        assert left == [True, 0, {"Parameter"}, {"Tensor"}, False]
