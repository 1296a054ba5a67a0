"""A context leaves nothing behind: no file descriptor, thread, hook, patch, memory or reference."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tlsched
from tests.training import compare, loops, models
from tests.training.compare import Outcome, hold, outcome, trainer
from tests.training.faulty import (
    LeaveError,
    deep_net,
    step,
)
from tests.training.ranks import RankPool
from tlsched.errors import CommunicationError

CONTEXTS = 50
WARM_UP = 8
TIMEOUT_S = 10.0
LAST_LANE_S = 2 * TIMEOUT_S
GROWTH_MIB = 40  # 42 contexts; if each kept its gradients, it would be 100, and the model 300


def _context(rank: int, ending: str) -> None:
    """One context that ends as ``ending`` says."""
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batches = models.batches("mlp", rank, 4)
    with suppress(LeaveError), tlsched.schedule(net, optimizer, timeout_s=TIMEOUT_S):
        for number, batch in enumerate(batches):
            if ending == "in flight" and number == 3:
                loops.backward(models.loss("mlp", net, batch))
                raise LeaveError
            step(net, optimizer, batch)
        if ending == "exception":
            raise LeaveError


def _state() -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # threads that come and go leave half-used arenas
    status = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_mib": int(status.split()[0]) // 1024,
    }


def _many_contexts(rank: int, _size: int, ending: str) -> tuple[dict[str, int], dict[str, int]]:
    warnings.simplefilter("ignore")  # an update that is missing after "in flight"
    for _ in range(WARM_UP):
        _context(rank, ending)
    dist.barrier()
    before = _state()
    for _ in range(CONTEXTS - WARM_UP):
        _context(rank, ending)
    dist.barrier()
    # A lane whose last send gloo forgot is closed when gloo's own timeout ends it.
    end_s = time.monotonic() + LAST_LANE_S
    while (after := _state())["fds"] > before["fds"] and time.monotonic() < end_s:
        time.sleep(0.5)
    return before, after


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["normal", "exception", "in flight"])
def test_fifty_contexts_leave_no_growth(two_ranks: RankPool, ending: str) -> None:
    for before, after in two_ranks.run(_many_contexts, ending):
        assert after["fds"] <= before["fds"]
        assert after["threads"] <= before["threads"]
        assert after["rss_mib"] - before["rss_mib"] < GROWTH_MIB


def _hooks(net: nn.Module) -> list[Any]:
    of_modules = [
        getattr(module, name)
        for module in net.modules()
        for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    ]
    of_parameters = [p._post_accumulate_grad_hooks for p in net.parameters()]
    return [hooks for hooks in (*of_modules, *of_parameters) if hooks]


def _methods() -> dict[str, Any]:
    classes = (nn.Module, nn.Parameter, torch.optim.Optimizer, torch.Tensor)
    return {f"{c.__name__}.{n}": v for c in classes for n, v in vars(c).items() if callable(v)}


def _restored(rank: int, _size: int, ending: str) -> list[str]:
    warnings.simplefilter("ignore")
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    before = _methods()
    with suppress(LeaveError), tlsched.schedule(net, optimizer):
        for number, batch in enumerate(models.batches("mlp", rank, 5)):
            if ending == "learning" and number == 1:
                break
            if ending == "exception" and number == 4:
                loops.backward(models.loss("mlp", net, batch))
                raise LeaveError
            step(net, optimizer, batch)
        loops.backward(models.loss("mlp", net, batch))
    wrong = [name for name, value in _methods().items() if before.get(name) is not value]
    wrong += [f"hooks {hooks}" for hooks in _hooks(net)]
    wrong += [name for name in ("step", "zero_grad", "state_dict") if name in optimizer.__dict__]
    for parameter in net.parameters():
        if type(parameter) is not nn.Parameter or type(parameter.grad) is not torch.Tensor:
            wrong.append(f"{type(parameter)} with {type(parameter.grad)}")
    if torch.overrides._get_current_function_mode() is not None:  # type: ignore[no-untyped-call]  # torch leaves it untyped
        wrong.append("a torch function mode")
    step(net, optimizer, batch)  # and it trains on, alone
    return wrong


@pytest.mark.parametrize("ending", ["normal", "learning", "exception"])
def test_everything_is_as_it_was(two_ranks: RankPool, ending: str) -> None:
    assert two_ranks.run(_restored, ending) == [[], []]


def _freed(rank: int, _size: int, ending: str) -> list[str]:
    """What is still alive, although the exception (with its frames) is kept."""
    warnings.simplefilter("ignore")
    kept: list[BaseException] = []
    threads = len(os.listdir("/proc/self/task"))
    fds = len(os.listdir("/proc/self/fd"))

    def train() -> dict[str, Any]:
        net = deep_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        watched = {"model": weakref.ref(net), "weight": weakref.ref(net[1].weight)}
        try:
            with tlsched.schedule(net, optimizer) as run:
                for number, batch in enumerate(models.batches("mlp", rank, 6)):
                    step(net, optimizer, batch)
                    if number == 4 and ending != "normal" and rank == 1:
                        raise LeaveError
                watched["lane"] = weakref.ref(run._agreement)
        except (LeaveError, CommunicationError) as error:
            kept.append(error)
            cause: BaseException | None = error
            while cause is not None:  # the loop's frames are the caller's to keep or not
                cause = cause.with_traceback(None).__cause__
        return watched

    watched = train()
    gc.collect()
    alive = [name for name, reference in watched.items() if reference() is not None]
    if len(os.listdir("/proc/self/task")) > threads + 1:  # a helper of torch's own
        alive.append("threads")
    if len(os.listdir("/proc/self/fd")) > fds:
        alive.append("file descriptors")
    return alive


@pytest.mark.parametrize("ending", ["normal", "exception"])
def test_nothing_keeps_the_model_alive(two_ranks: RankPool, ending: str) -> None:
    assert two_ranks.run(_freed, ending) == [[], []]


class Backwards(nn.Module):
    """Uses its layers in another order than it holds them: buckets change after learning."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """First to last."""
        out: torch.Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out


def _keeping(rank: int, _size: int, policy: str) -> Outcome:
    torch.manual_seed(3)
    net = Backwards()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept: list[list[Any]] = []
    values: list[list[torch.Tensor]] = []
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank, 5):
            loops.backward(t.forward(x).square().mean())
            kept.append([p.grad for p in net.parameters()])
            values.append([gradient.clone() for gradient in kept[-1]])
            optimizer.step()
            optimizer.zero_grad()
    for gradients, before in zip(kept, values, strict=True):
        assert models.identical(gradients, before)
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        loops.backward(net(torch.ones(1, 16)).sum())  # accumulates into what was kept
    return outcome(net, [p.grad for p in net.parameters()])


def test_kept_gradients_outlive_their_bucket(two_ranks: RankPool) -> None:
    hold(two_ranks, _keeping, ddp=False)
