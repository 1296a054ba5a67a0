"""A training of several buckets in which ranks suffer faults, and what each rank tells of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import tlsched
from tests.training import loops, models

MARGIN_S = 20.0  # two cores, shared
SOON_S = 5.0
STEPS = 12
FAULT_STEP = 6  # after the first two have been watched

Fault = Callable[[tlsched.Run, nn.Module], None]


class LeaveError(Exception):
    """The loop's own exception."""


def deep_net(width: int = 384) -> nn.Sequential:
    """Several buckets, each on a lane of its own."""
    torch.manual_seed(3)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), *hidden, nn.Linear(width, models.CLASSES)
    )


def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """One iteration."""
    loops.backward(models.loss("mlp", net, batch))
    optimizer.step()
    optimizer.zero_grad()


@dataclass
class Outcome:
    """How a rank's training ended; ``seconds`` since the fault step began."""

    error: str
    message: str
    seconds: float
    threads: int
    steps: int


def train_with_faults(
    rank: int,
    _size: int,
    faults: dict[int, Fault],
    policy: str = "kernel",
    timeout_s: float = 60.0,
    options: dict[str, Any] | None = None,
) -> Outcome:
    """Train, with ``options`` of schedule(); rank r suffers ``faults[r]`` in the fault step."""
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = models.batches("mlp", rank, STEPS)
    threads = threading.active_count()
    began_s, step = time.monotonic(), 0
    try:
        with tlsched.schedule(
            net, optimizer, policy=policy, timeout_s=timeout_s, **options or {}
        ) as run:
            for step, batch in enumerate(batches):
                if step == FAULT_STEP:
                    began_s = time.monotonic()
                    if rank in faults:
                        faults[rank](run, net)
                loops.backward(models.loss("mlp", net, batch))
                optimizer.step()
                optimizer.zero_grad()
    except BaseException as error:
        assert "step" not in optimizer.__dict__
        assert not any(type(p.grad).__name__ == "Promise" for p in net.parameters())
        return Outcome(
            type(error).__name__,
            str(error),
            time.monotonic() - began_s,
            threading.active_count() - threads,
            step,
        )
    return Outcome("", "", time.monotonic() - began_s, threading.active_count() - threads, step)
