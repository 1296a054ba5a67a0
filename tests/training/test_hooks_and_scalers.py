"""Hooks, GradScaler and gradients of gradients between backward and step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.training import compare
from tests.training.compare import Outcome, hold, listening, outcome, trainer
from tests.training.ranks import RankPool


def _hooks(rank: int, _size: int, policy: str, inside: bool) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[float] = []

    def note(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.abs().sum().item())
        parameter.grad.clamp_(-0.01, 0.01)

    def register() -> None:
        for p in net.parameters():
            p.register_hook(lambda g: g * 0.5)
            p.register_post_accumulate_grad_hook(note)

    if not inside:
        register()
    with trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            if inside and number == 3:
                register()
            optimizer.zero_grad(set_to_none=number % 3 > 0)
            t.forward(x).square().mean().backward()
            optimizer.step()
    return outcome(net, sorted(seen))


@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
def test_hooks_of_the_users_see_what_they_see_under_ddp(two_ranks: RankPool, inside: bool) -> None:
    hold(two_ranks, _hooks, inside)


def _scaler(rank: int, _size: int, policy: str, unscale: bool, fused: bool) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    amp = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    with trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = t.forward(x).square().mean()
            factor = float("inf") if number in (3, 5) and rank == number % 2 else 1.0
            amp.scale(loss * factor).backward()
            if unscale:
                amp.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            amp.step(optimizer)
            amp.update()
            t.log.append(amp.get_scale())
    return outcome(net, t.log)


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale and clip"])
def test_all_ranks_skip_the_same_steps_of_a_scaler(
    two_ranks: RankPool, unscale: bool, fused: bool
) -> None:
    results = hold(two_ranks, _scaler, unscale, fused, rtol=2e-6)
    assert min(results["kernel"][0].log) < max(results["kernel"][0].log)


def _grad_of_grad(rank: int, _size: int, policy: str, how: str) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with listening() as said, trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            optimizer.zero_grad()
            x.requires_grad_()
            loss = t.forward(x).square().mean()
            if how == "penalty":
                (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
                (loss + of_x.square().sum()).backward()
            elif how == "autograd.grad":
                of_p = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
                t.log.append([g.clone() for g in of_p])
                loss.backward()
            elif how == "create_graph":
                loss.backward(create_graph=True)
            elif how == "twice":
                loss.backward(retain_graph=True)
                loss.backward()
            elif how == "inputs":
                loss.backward(inputs=list(net.parameters())[:2])
            optimizer.step()
            optimizer.zero_grad()
    return outcome(net, t.log, [w for w in said if "gradients of gradients" in str(w.message)])


@pytest.mark.parametrize("how", ["penalty", "autograd.grad", "create_graph", "twice", "inputs"])
def test_gradients_of_gradients_and_two_backwards_of_one_graph(
    two_ranks: RankPool, how: str
) -> None:
    # DDP averages only the first backward of a forward, and fails on a graph of gradients.
    ddp = how in ("penalty", "autograd.grad")
    results = hold(two_ranks, _grad_of_grad, how, ddp=ddp)
    said = [text for result in results["kernel"] for text in result.said]
    assert len(said) == (2 if how == "create_graph" else 0), said
