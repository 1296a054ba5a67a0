"""Training loops as people write them, for DDP and for tlsched alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tlsched
from tests.training import models

LR_CLIP = 0.05


@dataclass
class Setting:
    """What a loop works with. ``forward`` is what it calls, ``net`` the bare model."""

    name: str
    net: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[Any]]

    def loss(self, batch: Any) -> torch.Tensor:
        """The model's loss on ``batch``."""
        return models.loss(self.name, self.forward, batch)


def backward(loss: torch.Tensor) -> None:
    """Typed, as torch's is not."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


Loop = Callable[[Setting, list[Any]], None]


def plain(s: Setting, batches: list[Any]) -> None:
    """backward, step, zero_grad."""
    for batch in batches:
        backward(s.loss(batch))
        s.optimizer.step()
        s.optimizer.zero_grad()


def accumulation(s: Setting, batches: list[Any]) -> None:
    """Three micro-batches a step under no_sync, the last step shorter; zeros in place of None."""
    for number, batch in enumerate(batches):
        if number % 3 == 2 or number == len(batches) - 1:
            backward(s.loss(batch))
            s.optimizer.step()
            s.optimizer.zero_grad(set_to_none=False)
        else:
            with s.no_sync():
                backward(s.loss(batch))


def clipping(s: Setting, batches: list[Any]) -> None:
    """The norm of all averaged gradients, then each value."""
    for batch in batches:
        s.optimizer.zero_grad()
        backward(s.loss(batch))
        nn.utils.clip_grad_norm_(s.net.parameters(), LR_CLIP)
        nn.utils.clip_grad_value_(s.net.parameters(), LR_CLIP / 10)
        s.optimizer.step()


def scaler(s: Setting, batches: list[Any]) -> None:
    """GradScaler on the CPU, with an overflow in the fourth iteration on one rank only."""
    amp = torch.amp.GradScaler("cpu", init_scale=64.0)
    overflows = torch.distributed.get_rank() == 1
    for number, batch in enumerate(batches):
        s.optimizer.zero_grad()
        loss = s.loss(batch)
        if number == 3 and overflows:
            loss = loss * float("inf")
        backward(amp.scale(loss))
        amp.step(s.optimizer)
        amp.update()


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "accumulation": accumulation,
    "clipping": clipping,
    "scaler": scaler,
}


@contextmanager
def setting(
    policy: str, name: str, net: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[Setting]:
    """``net`` under DDP (policy "ddp") or under tlsched."""
    if policy == "ddp":
        forward = DistributedDataParallel(net, find_unused_parameters=name == "unused")
        yield Setting(name, net, forward, optimizer, forward.no_sync)
        return
    with tlsched.schedule(net, optimizer, policy=policy) as run:
        yield Setting(name, net, net, optimizer, run.no_sync)


def train(
    rank: int, _size: int, policy: str, name: str, optimizer: str, loop: str, steps: int
) -> models.Tensors:
    """Body for a rank: the parameters after ``steps`` batches."""
    torch.manual_seed(5)
    # DDP cannot train a reentrant block used twice; the other flavour computes the same.
    net = models.MODELS["checkpoint" if (policy, name) == ("ddp", "reentrant") else name]()
    opt = models.OPTIMIZERS[optimizer](net)
    with setting(policy, name, net, opt) as s:
        LOOPS[loop](s, models.batches(name, rank, steps))
    return models.parameters(net)
