"""Replayed trainings as benchmarks begin them: the knobs at their best, the results held alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from tlsched.demo.cluster import Cluster
from tlsched.demo.job import WARMUP, Job, Result
from tlsched.errors import TrainingError
from tlsched.planning.tuning import ROUNDS_A_TRIAL, TRIALS

if TYPE_CHECKING:
    from bench.step import Setting

# DDP's bucket sizes in MiB, of which "ddp-best" takes the best; torch's default is 25.
CAPS = (1, 5, 25, 100)
TRIAL_ITERATIONS = 4
# Until lanes are chosen anew; the others have settled when DDP has ordered its buckets anew.
PLANNING = ("lanes", "kernel", "prophet", "bytescheduler")
SETTLED = 3
# All of the tuning's windows, with the first rounds that it does not count.
TUNED = TRIALS * (ROUNDS_A_TRIAL + 2)
TOLERANCE = 1e-3  # of what an iteration changes the loss by: the rounding of float32


def job(setting: Setting, policy: str, iterations: int) -> Job:
    """``setting`` replayed under ``policy``, as it is before :func:`at_its_best`."""
    return Job(
        "replay",
        policy,
        iterations,
        compute_s=setting.compute_s,
        scale=setting.scale,
        model=setting.model,
        warmup=WARMUP if policy in PLANNING else SETTLED,
    )


def at_its_best(cluster: Cluster, wanted: Job, *, quick: bool = False) -> Job:
    """``wanted`` with the knobs of its policy as this lab likes them best.

    ``ddp-best`` is DDP with the best of CAPS, and ByteScheduler's window what its own tuner comes
    to (with ``quick`` its default). Others have none.
    """
    if wanted.policy == "ddp-best":
        tries = [
            replace(wanted, policy="ddp", bucket_cap_mb=cap, iterations=TRIAL_ITERATIONS)
            for cap in CAPS
        ]
        best = min(tries, key=lambda one: median(cluster.train(one)[0].iteration_s))
        return replace(best, iterations=wanted.iterations)
    if wanted.policy == "bytescheduler" and not quick:
        tuned = cluster.train(replace(wanted, warmup=TUNED, iterations=1))
        return replace(wanted, window=tuned[0].window)
    return wanted


def knobs(one: Job) -> dict[str, Any]:
    """What a row tells of the knobs."""
    found = {"bucket_cap_mb": one.bucket_cap_mb, "window": one.window}
    return {name: value for name, value in found.items() if value is not None}


def require_alike(done: Iterable[tuple[Job, list[Result]]]) -> None:
    """Raise TrainingError unless all these replays have learned the same, on every rank.

    Each iteration changes a replay's loss by the same amount, whoever averages the gradients.
    """
    first: float | None = None
    for one, results in done:
        updates = one.warmup + one.iterations - 1
        for rank, result in enumerate(results):
            learned = (1 - result.loss) / updates
            first = learned if first is None else first
            if abs(learned - first) > TOLERANCE * abs(first):
                raise TrainingError(
                    f"policy {one.policy} learns {learned:g} an iteration on rank {rank}, "
                    f"others {first:g}",
                    hint="its figures mean nothing: this is a fault of what was measured",
                )
