"""One training under one policy, as any user would write it; "ddp" is torch's own."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tlsched
from tlsched.demo import digits
from tlsched.demo.calibration import calibrate
from tlsched.demo.replay import ReplayedSGD, replayed
from tlsched.planning.policies import PolicySettings, Window

REPLAY_MODEL = "vgg16"
REPLAY_SCALE = 0.1
REPLAY_COMPUTE_S = 0.6
# Two iterations learn, seven are measured, then the lanes are chosen anew; two more to settle. The
# same for all policies.
WARMUP = 11


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is asked to do: ``part`` is real, replay, or calibrate, which trains nothing.

    ``compute_s`` (seconds an iteration), ``scale`` (of layer sizes) and ``model`` (a shape's name)
    are the replay's. ``window`` are bytes of a partition and of credit for ``bytescheduler``, which
    is tuned without.
    """

    part: str
    policy: str
    iterations: int
    trace: bool = False
    compute_s: float = REPLAY_COMPUTE_S
    scale: float = REPLAY_SCALE
    model: str = REPLAY_MODEL
    window: tuple[int, int] | None = None


@dataclass(slots=True)
class Result:
    """Seconds of each iteration after the warm-up, the last loss and, for real, the accuracy.

    ``peak_bytes`` is the most memory that the process has had resident so far.

    ``window`` is the one that ``bytescheduler`` used at last, ``messages`` the all-reduces of an
    iteration. ``fabric`` is what was calibrated (see :mod:`tlsched.demo.calibration`).

    ``timeline`` holds a dict a bucket (``bytes``, ``ready_s``, ``sent_s``, ``needed_s``, measured
    from the step() before) of one iteration, when it was asked for.
    """

    iteration_s: list[float]
    loss: float
    accuracy: float | None = None
    peak_bytes: int = 0
    window: tuple[int, int] | None = None
    messages: float | None = None
    fabric: dict[str, float] = field(default_factory=dict)
    timeline: list[dict[str, float]] = field(default_factory=list)


def train(job: Job, rank: int, size: int) -> Result:
    """Do ``job`` as one of ``size`` ranks."""
    torch.manual_seed(1)
    if job.part == "calibrate":
        return Result([], 0.0, fabric=calibrate(size))
    result = _train_digits(job, rank, size) if job.part == "real" else _train_replay(job)
    result.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def _train_digits(job: Job, rank: int, size: int) -> Result:
    x, y, test_x, test_y = digits.images()
    net = digits.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    # BatchNorm's running statistics are each rank's own under both.
    with _around(job, net, optimizer) as around:
        times, loss = _loop(
            digits.batches(rank, size, job.iterations + WARMUP, x, y),
            lambda batch: loss_of(around.model(batch[0]), batch[1]),
            optimizer,
        )
    losses = torch.tensor([loss])
    dist.all_reduce(losses)
    net.eval()
    with torch.no_grad():
        accuracy = (net(test_x).argmax(1) == test_y).float().mean()
    return Result(times, float(losses) / size, float(accuracy))


def _train_replay(job: Job) -> Result:
    net = replayed(job.model, compute_s=job.compute_s, scale=job.scale)
    optimizer = ReplayedSGD(net.parameters(), lr=1e-3)
    x = torch.ones(1)
    with _around(job, net, optimizer) as around:
        times, loss = _loop(
            [x] * (job.iterations + WARMUP), lambda batch: around.model(batch).sum(), optimizer
        )
        result = Result(times, loss, timeline=around.timeline() if job.trace else [])
        if around.run is not None:
            window = around.run.settings.window
            result.window = (window.partition_bytes, window.credit_bytes) if window else None
            result.messages = around.run.messages / (job.iterations + WARMUP)
    return result


def _loop(
    batches: list[Any], loss_of: Callable[[Any], torch.Tensor], optimizer: torch.optim.Optimizer
) -> tuple[list[float], float]:
    """An ordinary training loop; seconds between one step() and the next, after the warm-up."""
    times: list[float] = []
    loss = torch.tensor(0.0)
    before_s = time.perf_counter()
    for number, batch in enumerate(batches):
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        optimizer.zero_grad()
        now_s = time.perf_counter()
        if number >= WARMUP:
            times.append(now_s - before_s)
        before_s = now_s
    return times, float(loss)


@dataclass(frozen=True, slots=True)
class Around:
    """The module to call, its timeline, and tlsched's context where it is one."""

    model: nn.Module
    timeline: Callable[[], list[dict[str, float]]]
    run: tlsched.Run | None = None


@contextmanager
def _around(job: Job, net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Around]:
    """The context in which ``job.policy`` trains."""
    if job.policy == "ddp":
        from tlsched.demo.ddp_trace import DdpTrace

        wrapped = DistributedDataParallel(net, broadcast_buffers=False)
        yield Around(wrapped, DdpTrace(wrapped).timeline if job.trace else list)
        return
    settings = PolicySettings(window=Window(*job.window) if job.window else None)
    with tlsched.schedule(
        net,
        optimizer,
        policy=job.policy,
        settings=settings,
        broadcast_buffers=False,
        trace=job.trace,
    ) as run:
        yield Around(net, lambda: _timeline(run), run)


def _timeline(run: tlsched.Run) -> list[dict[str, float]]:
    """One settled iteration: its buckets' times, needed in the iteration after it."""
    assert run.trace is not None
    made, used = list(run.trace.iterations)[-3:-1]
    sizes = {row["bucket"]: row["bytes"] for row in run.report()}
    return [
        {
            "bytes": sizes[bucket],
            "ready_s": made.ready_s[bucket] - made.start_s,
            "sent_s": made.sent_s[bucket] - made.start_s,
            "needed_s": used.needed_s[bucket] - made.start_s,
        }
        for bucket in sorted(made.ready_s)
    ]
