"""No reader of a parameter ever sees it before its update, whoever he is and wherever he stands."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.training import compare
from tests.training.compare import Outcome, Trainer, hold, outcome, trainer
from tests.training.loops import backward
from tests.training.ranks import RankPool

Reader = Callable[[Trainer, int], Any]


def _ema(t: Trainer, _number: int) -> Any:
    """Averages over parameters() after each step."""
    if not t.log:
        return [p.detach().clone() for p in t.net.parameters()]
    return [old.lerp(p.detach(), 0.1) for old, p in zip(t.log[-1], t.net.parameters(), strict=True)]


def _kept_list(t: Trainer, number: int) -> Any:
    """A list of parameters made before training, read every fifth step only."""
    return [float(p.norm()) for p in t.kept] if number % 5 == 4 else None  # type: ignore[attr-defined]  # set below


def _fifth_weight(t: Trainer, number: int) -> Any:
    return t.net[0].weight.sum().item() if number % 5 == 4 else None


def _state_dict(t: Trainer, number: int) -> Any:
    return [v.clone() for v in t.net.state_dict().values()] if number % 4 == 3 else None


def _named(t: Trainer, number: int) -> Any:
    return {n: p.mean().item() for n, p in t.net.named_parameters()} if number == 4 else None


def _deepcopy(t: Trainer, number: int) -> Any:
    return list(copy.deepcopy(t.net).parameters()) if number % 3 == 2 else None


def _deepcopy_weight(t: Trainer, number: int) -> Any:
    return copy.deepcopy(t.net[2].weight).detach() if number == 5 else None


def _pickle(t: Trainer, number: int) -> Any:
    return list(pickle.loads(pickle.dumps(t.net)).parameters()) if number == 5 else None


def _save_weight(t: Trainer, number: int) -> Any:
    if number != 5:
        return None
    file = io.BytesIO()
    torch.save(t.net[0].weight, file)
    file.seek(0)
    return torch.load(file).detach()


def _numpy(t: Trainer, number: int) -> Any:
    return t.net[0].bias.detach().numpy().tolist() if number == 6 else None


def _held_view(t: Trainer, number: int) -> Any:
    return t.views[0].clone() if number % 5 == 4 else None  # type: ignore[attr-defined]  # set below


def _function(t: Trainer, number: int) -> Any:
    if number != 5:
        return None
    x = torch.ones(1, 16)
    return nn.functional.linear(x, t.net[0].weight, bias=t.net[0].bias).detach()


def _custom_function(t: Trainer, number: int) -> Any:
    return Doubled.apply(t.net[0].weight).detach() if number == 5 else None  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _validation(t: Trainer, number: int) -> Any:
    if number % 4 != 3:
        return None
    t.net.eval()
    with torch.no_grad():
        value = t.net(torch.ones(2, 16)).clone()
    t.net.train()
    return value


def _inference(t: Trainer, number: int) -> Any:
    if number not in (3, 5):
        return None
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        return t.net(torch.ones(2, 16)).float().sum().item()


def _data_clamp(t: Trainer, _number: int) -> Any:
    """WGAN's clipping of weights."""
    for p in t.net.parameters():
        p.data.clamp_(-0.2, 0.2)


def _in_place(t: Trainer, _number: int) -> Any:
    with torch.no_grad():
        t.net[0].weight.mul_(0.99)


def _reload(t: Trainer, number: int) -> Any:
    if number == 3:
        t.saved = copy.deepcopy(t.net.state_dict())  # type: ignore[attr-defined]  # for below
    elif number == 5:
        t.net.load_state_dict(t.saved)  # type: ignore[attr-defined]  # set above


def _functional_call(t: Trainer, number: int) -> Any:
    if number % 3 != 2:
        return None
    parameters = dict(t.net.named_parameters())
    return torch.func.functional_call(t.net, parameters, (torch.ones(1, 16),)).detach()


class Doubled(torch.autograd.Function):
    """Reads its argument in a forward of its own."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


READERS: list[Reader] = [
    _ema, _kept_list, _fifth_weight, _state_dict, _named, _deepcopy, _deepcopy_weight, _pickle,
    _save_weight, _numpy, _held_view, _function, _custom_function, _validation, _inference,
    _data_clamp, _in_place, _reload, _functional_call,
]  # fmt: skip


def _read_after_step(rank: int, _size: int, policy: str, reader: Reader) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with trainer(policy, rank, net, optimizer) as t:
        t.kept = list(net.parameters())  # type: ignore[attr-defined]  # for the readers
        t.views = [p.data for p in net.parameters()]  # type: ignore[attr-defined]  # idem
        if reader is not _held_view:
            t.views.clear()  # type: ignore[attr-defined]  # idem
        for number, x in enumerate(compare.data(rank)):
            backward(t.forward(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            seen = reader(t, number)
            t.log.append(seen)
    return outcome(net, t.log)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__.strip("_"))
def test_a_reader_after_step_sees_the_updated_weights(two_ranks: RankPool, reader: Reader) -> None:
    hold(two_ranks, _read_after_step, reader)


def _strict(rank: int, _size: int, reader: Reader) -> str | None:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    try:
        with trainer("kernel", rank, net, optimizer, strict=True) as t:
            t.kept = list(net.parameters())  # type: ignore[attr-defined]  # for the readers
            for number, x in enumerate(compare.data(rank)):
                backward(net(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                reader(t, number)
    except Exception as error:
        assert all(type(p) is nn.Parameter for p in net.parameters())
        return str(error)
    return None


@pytest.mark.parametrize("reader", [_kept_list, _fifth_weight, _function, _custom_function, _named])
def test_strict_names_what_was_never_read_while_learning(
    two_ranks: RankPool, reader: Reader
) -> None:
    for said in two_ranks.run(_strict, reader):
        assert said is not None
        assert "0.weight is read where" in said


@pytest.mark.parametrize("reader", [_ema, _state_dict, _validation])
def test_strict_lets_pass_what_it_learned_and_what_flushes(
    two_ranks: RankPool, reader: Reader
) -> None:
    assert two_ranks.run(_strict, reader) == [None, None]
