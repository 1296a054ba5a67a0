"""Every optimizer updates as it does alone, whatever it keeps, counts or is asked in between."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tlsched
from tests.training import compare, models
from tests.training.compare import Outcome, hold, listening, outcome, trainer
from tests.training.ranks import RankPool
from tlsched.errors import ModelRefused

Make = Callable[[nn.Module], Any]


def _muon(net: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in net.parameters() if p.ndim == 2]
    vectors = [p for p in net.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors)]


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups that cut through every module, so that a bucket has parameters of both."""
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim < 2], "lr": 3e-3},
    ]


OPTIMIZERS: dict[str, Make] = {
    name: (lambda net, kind=name: getattr(torch.optim, kind)(net.parameters(), lr=1e-2))
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
        "RMSprop", "Rprop", "SGD",
    )
} | {
    "Muon": _muon,
    "Adam foreach": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2, foreach=True),
    "AdamW amsgrad": lambda net: torch.optim.AdamW(net.parameters(), amsgrad=True),
    "AdamW fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
    "Adagrad fused": lambda net: torch.optim.Adagrad(net.parameters(), lr=1e-2, fused=True),
    "SGD fused": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True),
    "SGD nesterov": lambda net: torch.optim.SGD(
        net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True
    ),
    "SGD maximize": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, maximize=True),
    "lr tensor": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(1e-2)),
    "groups": lambda net: torch.optim.AdamW(_groups(net), lr=1e-2),
}  # fmt: skip


def _optimized(rank: int, _size: int, policy: str, name: str) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    made = OPTIMIZERS[name](net)
    optimizers = made if isinstance(made, list) else [made]
    with listening() as said, trainer(policy, rank, net, made) as t:
        for x in compare.data(rank):
            t.forward(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return outcome(net, [], [w for w in said if "tlsched" in str(w.message)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_own_optimizers(two_ranks: RankPool, name: str) -> None:
    # Rprop acts on a gradient's sign: a last bit of difference may flip it, hence a wider limit.
    results = hold(two_ranks, _optimized, name, rtol=2e-5 if name == "Muon" else 1e-5)
    assert results["kernel"][0].said == []


def _lbfgs(_rank: int, _size: int) -> str:
    net = compare.mlp()
    with pytest.raises(ModelRefused) as caught:
        tlsched.schedule(net, torch.optim.LBFGS(net.parameters()))
    assert "step" not in vars(net)
    return str(caught.value)


def test_lbfgs_is_refused(two_ranks: RankPool) -> None:
    assert two_ranks.run(_lbfgs)[0].startswith("LBFGS evaluates the loss several times")


def _plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "plateau": _plateau,
}


def _scheduled(
    rank: int, _size: int, policy: str, name: str, before: bool, tensor: bool
) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    lr: Any = torch.tensor(0.1) if tensor else 0.1
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    schedule = SCHEDULERS[name](optimizer) if before else None
    with listening() as said, trainer(policy, rank, net, optimizer) as t:
        schedule = schedule or SCHEDULERS[name](optimizer)
        for number, x in enumerate(compare.data(rank)):
            loss = t.forward(x).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step(*([float(number)] if name == "plateau" else []))
            optimizer.zero_grad()
            t.log.append(float(optimizer.param_groups[0]["lr"]))
    after = [w for w in said if "find_unused" not in str(w.message)]
    assert type(optimizer).step is not None
    return outcome(net, t.log, after)


@pytest.mark.parametrize("before", [True, False], ids=["before", "inside"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_act_as_of_step_and_warn_of_nothing(
    two_ranks: RankPool, name: str, before: bool
) -> None:
    results = hold(two_ranks, _scheduled, name, before, name in ("step", "cosine"))
    ours, ddps = results["kernel"][0].said, results["ddp"][0].said
    assert [w for w in ours if w not in ddps] == []


def _resumed(rank: int, _size: int, policy: str, how: str) -> Outcome:
    """Saved in the middle, loaded into new objects, or back into the same ones, and gone on."""
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True)
    batches = compare.data(rank, 12)
    saved: Any = None

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    with trainer(policy, rank, net, optimizer):
        for x in batches[:6]:
            step(x)
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        if how == "back":
            for x in batches[6:9]:
                step(x)
            optimizer.load_state_dict(saved["optimizer"])
            net.load_state_dict(saved["net"])
        if how in ("back", "on"):
            for x in batches[6:]:
                step(x)
    if how == "new":
        net = compare.mlp()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        with trainer(policy, rank, net, optimizer):
            for x in batches[6:]:
                step(x)
    state = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    return outcome(net, state)


def test_a_saved_run_goes_on_bit_for_bit(two_ranks: RankPool) -> None:
    straight = hold(two_ranks, _resumed, "on", ddp=False)["kernel"][0]
    for how in ("new", "back"):
        again = hold(two_ranks, _resumed, how, ddp=False)["kernel"][0]
        assert models.identical(again.parameters, straight.parameters), how
        assert models.identical(again.log, straight.log), how
