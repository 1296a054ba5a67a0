"""One training under one policy, as any user would write it; "ddp" is torch's own."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tlsched.demo import digits, text
from tlsched.demo.calibration import calibrate
from tlsched.demo.contexts import Context, around
from tlsched.demo.job import Job, Result
from tlsched.demo.replay import ReplayedSGD, replayed


def train(job: Job, rank: int, size: int) -> Result:
    """Do ``job`` as one of ``size`` ranks."""
    torch.manual_seed(1)
    if job.part == "calibrate":
        return Result([], 0.0, fabric=calibrate(size))
    trainings = {"real": _train_digits, "text": _train_text, "replay": _train_replay}
    result = trainings[job.part](job, rank, size)
    result.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def _train_digits(job: Job, rank: int, size: int) -> Result:
    x, y, test_x, test_y = digits.images()
    net = digits.model()
    loss_of = nn.CrossEntropyLoss()
    # BatchNorm's running statistics are each rank's own under both.
    batches = digits.batches(rank, size, job.iterations + job.warmup, x, y)
    result = _train(
        job,
        net,
        lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        batches,
        lambda forward, batch: loss_of(forward(batch[0]), batch[1]),
    )
    result.loss = _mean(result.loss, size)
    net.eval()
    with torch.no_grad():
        result.accuracy = float((net(test_x).argmax(1) == test_y).float().mean())
    return result


def _train_text(job: Job, rank: int, size: int) -> Result:
    result = _train(
        job,
        text.model(),
        lambda net: torch.optim.Adam(net.parameters(), lr=1e-3),
        text.batches(rank, size, job.iterations + job.warmup),
        text.loss,
    )
    result.loss = _mean(result.loss, size)
    return result


def _train_replay(job: Job, _rank: int, _size: int) -> Result:
    return _train(
        job,
        replayed(job.model, compute_s=job.compute_s, scale=job.scale),
        lambda net: ReplayedSGD(net.parameters(), lr=1e-3),
        [torch.ones(1)] * (job.iterations + job.warmup),
        lambda forward, batch: forward(batch).sum(),
    )


def _train(
    job: Job,
    net: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: list[Any],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
) -> Result:
    began_s = time.perf_counter()
    with around(job, net, make_optimizer) as context:
        startup_s = time.perf_counter() - began_s
        result = _loop(job, context, batches, loss_of)
        result.startup_s = startup_s
        if context.run is not None:
            window = context.run.settings.window
            result.window = (window.partition_bytes, window.credit_bytes) if window else None
            result.messages = context.run.messages / (job.iterations + job.warmup)
        result.timeline = context.timeline() if job.trace else []
    return result


def _loop(
    job: Job,
    context: Context,
    batches: list[Any],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
) -> Result:
    """An ordinary training loop; seconds between one step() and the next, after the warm-up."""
    times: list[float] = []
    losses: list[float] = []
    before_s, busy_s, began_s = time.perf_counter(), time.process_time(), time.monotonic()
    for number, batch in enumerate(batches):
        if number == job.warmup:
            busy_s, began_s = time.process_time(), time.monotonic()
        loss = loss_of(context.forward, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        context.optimizer.step()
        context.optimizer.zero_grad()
        losses.append(float(loss.detach()))
        now_s = time.perf_counter()
        if number >= job.warmup:
            times.append(now_s - before_s)
        before_s = now_s
    cpu_s = (time.process_time() - busy_s) / max(1, len(times))
    return Result(times, losses[-1], losses=losses, began_s=began_s, cpu_s=cpu_s)


def _mean(loss: float, size: int) -> float:
    losses = torch.tensor([loss])
    dist.all_reduce(losses)
    return float(losses) / size
