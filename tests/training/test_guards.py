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
from torch.nn.utils import parametrizations

from tests.training import compare
from tests.training.compare import Outcome, Trainer, hold, listening, outcome, trainer
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


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


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
