"""Train the same loop under DDP, sync and kernel, and hold the results against each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tlsched
from tests.training import models
from tests.training.ranks import RankPool

STEPS = 8


@dataclass
class Trainer:
    """What a loop body works with under either library."""

    policy: str
    rank: int
    net: Any
    forward: Any
    optimizer: Any
    run: Any
    log: list[Any] = field(default_factory=list)

    def no_sync(self) -> Any:
        """The library's own."""
        return self.run.no_sync() if self.run is not None else self.forward.no_sync()

    def flush(self) -> None:
        """Nothing under DDP."""
        if self.run is not None:
            self.run.flush()


@contextmanager
def trainer(
    policy: str, rank: int, net: nn.Module, optimizer: Any, **options: Any
) -> Iterator[Trainer]:
    """``net`` under DDP (policy "ddp") or tlsched."""
    if policy == "ddp":
        forward = DistributedDataParallel(net, find_unused_parameters=True)
        yield Trainer(policy, rank, net, forward, optimizer, None)
        return
    with tlsched.schedule(net, optimizer, policy=policy, **options) as run:
        yield Trainer(policy, rank, net, net, optimizer, run)


def data(rank: int, steps: int = STEPS, rows: int = 8, width: int = 16) -> list[torch.Tensor]:
    """``steps`` batches, different on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(rows, width, generator=generator) for _ in range(steps)]


def mlp(width: int = 16) -> Any:
    """Two small layers: what matters is who reads them. (Any: torch types an item as a tensor.)"""
    return nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, 4))


class Wide(nn.Sequential):
    """Two buckets, since a bucket of all parameters would not be a part."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 300), nn.Linear(300, 4))


@dataclass
class Outcome:
    """What one rank brings home."""

    parameters: models.Tensors
    log: list[Any]
    said: list[str]


def outcome(net: nn.Module, log: Sequence[Any] = (), said: Sequence[Any] = ()) -> Outcome:
    """Of this rank."""
    return Outcome(models.parameters(net), list(log), [str(w.message) for w in said])


@contextmanager
def listening() -> Iterator[list[warnings.WarningMessage]]:
    """Records every warning but the one about loopback."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="tlsched: the kernel does not order")
        yield said


def hold(
    pool: RankPool,
    body: Callable[..., Outcome],
    *args: Any,
    rtol: float = 1e-6,
    ddp: bool = True,
) -> dict[str, list[Outcome]]:
    """Run ``body(rank, size, policy, *args)`` under each policy; compare parameters and logs."""
    policies = ("ddp", "sync", "kernel") if ddp else ("sync", "kernel")
    by_rank = pool.run(_each, body, policies, *args)
    results = {policy: [of_rank[policy] for of_rank in by_rank] for policy in policies}
    kernel, sync = results["kernel"], results["sync"]
    for of_rank in kernel:
        assert models.identical(of_rank.parameters, kernel[0].parameters), "ranks diverged"
    assert models.identical(sync[0].parameters, kernel[0].parameters), "sync and kernel differ"
    for reference in ("sync", "ddp") if ddp else ("sync",):
        for ours, theirs in zip(kernel, results[reference], strict=True):
            _close([ours.parameters, ours.log], [theirs.parameters, theirs.log], rtol)
    return results


def _each(
    rank: int, size: int, body: Callable[..., Outcome], policies: Sequence[str], *args: Any
) -> dict[str, Outcome]:
    results = {}
    for policy in policies:
        try:
            results[policy] = body(rank, size, policy, *args)
        except Exception as error:
            error.add_note(f"under policy {policy}")
            raise
    return results


def _close(ours: Any, theirs: Any, rtol: float) -> None:
    if isinstance(ours, torch.Tensor):
        ours, theirs = (t.float() if t.dtype is torch.bool else t for t in (ours, theirs))
        scale = float(theirs.detach().abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * max(scale, 1e-30))
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            _close(a, b, rtol)
    elif isinstance(ours, float):
        assert abs(ours - theirs) <= rtol * max(1.0, abs(theirs)), (ours, theirs)
    else:
        assert ours == theirs
