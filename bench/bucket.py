"""What a bucket costs a step: microseconds of Python, one rank alone, so nothing is waited for."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tlsched
from bench.record import spread
from tests.training.ranks import free_port

BUCKETS = 50
STEPS = 30
SKIP = 5


class Scale(nn.Module):
    """A tiny layer. Neighbours differ in dtype, so that they are not fused into one bucket."""

    def __init__(self, number: int) -> None:
        super().__init__()
        dtype = (torch.float32, torch.float64)[number % 2]
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add one element."""
        return x + self.weight[0]


class Nothing(torch.optim.Optimizer):
    """Updates nothing: what remains is tlsched's own."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Return."""


def measure(rounds: int) -> list[dict[str, Any]]:
    """Two rows: microseconds that a bucket adds to an iteration under tlsched, and gloo's part.

    Twice as many buckets are compared with half of them, less the same for the bare model, so that
    what an iteration or the model itself costs falls out.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.set_num_threads(1)
    values, dispatch = [], []
    try:
        for _ in range(rounds):
            dispatch.append(_dispatch_s() * 1e6)
            added = {
                scheduled: _iteration_s(2 * BUCKETS, scheduled) - _iteration_s(BUCKETS, scheduled)
                for scheduled in (False, True)
            }
            values.append((added[True] - added[False]) / BUCKETS * 1e6)
    finally:
        dist.destroy_process_group()
    return [
        {"what": "one bucket, one step", "microseconds": spread(values)},
        {"what": "of it gloo's call in C++", "microseconds": spread(dispatch)},
    ]


def _dispatch_s() -> float:
    """Least seconds that starting an all-reduce takes inside torch, whoever starts it."""
    group = dist.group.WORLD
    assert group is not None
    tensor, options, times = torch.ones(1), dist.AllreduceOptions(), []
    for _ in range(STEPS * BUCKETS):
        started_s = time.perf_counter()
        work = group.allreduce([tensor], options)
        times.append(time.perf_counter() - started_s)
        work.wait()
    return min(times)


def _iteration_s(buckets: int, scheduled: bool) -> float:
    net = nn.Sequential(*(Scale(number) for number in range(buckets)))
    optimizer = Nothing(net.parameters(), {})
    if not scheduled:
        return _loop(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loopback has no tree
        with tlsched.schedule(net, optimizer) as run:
            taken_s = _loop(net, optimizer)
            assert len(run.report()) == buckets
    return taken_s


def _loop(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Least seconds of an iteration: what interrupts it is not tlsched."""
    times = []
    x = torch.ones(1)
    for _ in range(STEPS):
        started_s = time.perf_counter()
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started_s)
    return min(times[SKIP:])
