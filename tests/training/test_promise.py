"""Whoever touches a gradient between backward and step has the average, and what he does counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.training import compare
from tests.training.compare import Outcome, Trainer, hold, outcome, trainer
from tests.training.ranks import RankPool

Touch = Callable[[Trainer, int], Any]


def _print(t: Trainer, _n: int) -> Any:
    return [str(p.grad) and p.grad.numpy().sum() * 1.0 for p in t.net.parameters()]


def _item(t: Trainer, _n: int) -> Any:
    return [p.grad.norm().item() for p in t.net.parameters()]


def _scale(t: Trainer, _n: int) -> Any:
    for p in t.net.parameters():
        p.grad *= 0.5
        p.grad /= 4
        p.grad = p.grad + 1e-3


def _data(t: Trainer, _n: int) -> Any:
    for p in t.net.parameters():
        p.grad.data.mul_(0.5)
    return [p.grad.data.clone() for p in t.net.parameters()]


def _assign(t: Trainer, _n: int) -> Any:
    for p in t.net.parameters():
        p.grad = p.grad.sign()


def _skip(t: Trainer, number: int) -> Any:
    """One parameter is not updated this time."""
    list(t.net.parameters())[number % 4].grad = None


def _skip_all(t: Trainer, number: int) -> Any:
    if number % 2:
        for p in t.net.parameters():
            p.grad = None


def _swap(t: Trainer, _n: int) -> Any:
    a, b = t.net[0], t.net[2]
    a.bias.grad, b.bias.grad = b.bias.grad.repeat(6), a.bias.grad[:4]


def _norm(t: Trainer, _n: int) -> Any:
    return [nn.utils.clip_grad_norm_(t.net.parameters(), 1e-2)]


def _norm_slow(t: Trainer, _n: int) -> Any:
    return [nn.utils.clip_grad_norm_(t.net.parameters(), 1e-2, norm_type=1.0, foreach=False)]


def _norm_each(t: Trainer, _n: int) -> Any:
    return [nn.utils.clip_grad_norm_(p, 1e-2) for p in t.net.parameters()]


def _value(t: Trainer, _n: int) -> Any:
    nn.utils.clip_grad_value_(t.net.parameters(), 1e-3)


def _value_foreach(t: Trainer, _n: int) -> Any:
    nn.utils.clip_grad_value_(t.net.parameters(), 1e-3, foreach=True)


def _vector(t: Trainer, _n: int) -> Any:
    return nn.utils.parameters_to_vector([p.grad for p in t.net.parameters()])


def _copies(t: Trainer, _n: int) -> Any:
    return [copy.deepcopy(p.grad) for p in t.net.parameters()]


def _stack(t: Trainer, _n: int) -> Any:
    return torch.stack([p.grad.abs().max() for p in t.net.parameters()]).tolist()


def _out(t: Trainer, _n: int) -> Any:
    for p in t.net.parameters():
        torch.mul(p.grad, 2.0, out=p.grad)


def _noise(t: Trainer, number: int) -> Any:
    generator = torch.Generator().manual_seed(number)
    for p in t.net.parameters():
        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=1e-3)


def _index(t: Trainer, _n: int) -> Any:
    for p in t.net.parameters():
        p.grad[0] = 0
        p.grad.view(-1)[-1] = 1.0


TOUCHES: list[Touch] = [
    _print, _item, _scale, _data, _assign, _skip, _skip_all, _swap, _norm, _norm_slow, _norm_each,
    _value, _value_foreach, _vector, _copies, _stack, _out, _noise, _index,
]  # fmt: skip


def _touched(rank: int, _size: int, policy: str, touch: Touch) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            optimizer.zero_grad()
            t.forward(x).square().mean().backward()
            t.log.append(touch(t, number))
            optimizer.step()
    return outcome(net, t.log)


@pytest.mark.parametrize("touch", TOUCHES, ids=lambda touch: touch.__name__.strip("_"))
def test_gradients_may_be_touched_between_backward_and_step(
    two_ranks: RankPool, touch: Touch
) -> None:
    hold(two_ranks, _touched, touch)


def _zero(t: Trainer, how: str) -> None:
    if how == "none":
        t.optimizer.zero_grad()
    elif how == "zeros":
        t.optimizer.zero_grad(set_to_none=False)
    elif how == "model":
        t.forward.zero_grad()
    elif how == "model zeros":
        t.forward.zero_grad(set_to_none=False)
    elif how == "loop":
        for p in t.net.parameters():
            p.grad = None
    elif how == "loop zeros":
        for p in t.net.parameters():
            if p.grad is not None:
                p.grad.zero_()
    elif how == "loop data":
        for p in t.net.parameters():
            if p.grad is not None:
                p.grad.data.zero_()
    elif how == "detach":
        for p in t.net.parameters():
            if p.grad is not None:
                p.grad = p.grad.detach()
                p.grad.zero_()
    elif how == "new":
        for p in t.net.parameters():
            p.grad = torch.zeros_like(p)


ZEROS = (
    "none", "zeros", "model", "model zeros", "loop", "loop zeros", "loop data", "detach", "new",
)  # fmt: skip


def _zeroed(rank: int, _size: int, policy: str, how: str, where: str) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            if where == "first":
                _zero(t, how)
            loss = t.forward(x).square().mean()
            if where == "before backward":
                _zero(t, how)
            loss.backward()
            optimizer.step()
            if where == "last":
                _zero(t, how)
            if where == "twice":
                _zero(t, how)
                optimizer.step()  # momentum goes on with zeros, or nothing happens with None
                _zero(t, how)
    return outcome(net)


def _zeroed_everywhere(rank: int, size: int, policy: str, how: str) -> Outcome:
    wheres = ("first", "before backward", "last", "twice", "never")
    each = [_zeroed(rank, size, policy, how, where).parameters for where in wheres]
    return Outcome([p for parameters in each for p in parameters], [], [])


@pytest.mark.parametrize("how", ZEROS)
def test_gradients_may_be_cleared_anywhere(two_ranks: RankPool, how: str) -> None:
    hold(two_ranks, _zeroed_everywhere, how)


def _kept_gradients(rank: int, _size: int, policy: str, view: bool) -> Outcome:
    """Gradients of two losses side by side, as gradient surgery needs them."""
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            kept = []
            for factor in (1.0, -0.3):
                optimizer.zero_grad()
                (t.forward(x) * factor).square().mean().backward()
                kept.append([p.grad.detach() if view else p.grad for p in t.net.parameters()])
            optimizer.zero_grad()
            for p, a, b in zip(net.parameters(), *kept, strict=True):
                p.grad = a + 2 * b * (a * b).sum().sign()
            optimizer.step()
            t.log.append([g.clone() for grads in kept for g in grads])
    return outcome(net, t.log)


@pytest.mark.parametrize("view", [False, True], ids=["the gradient", "a view of it"])
def test_gradients_kept_from_an_earlier_backward_stay_as_they_were(
    two_ranks: RankPool, view: bool
) -> None:
    hold(two_ranks, _kept_gradients, view)
