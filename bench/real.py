"""Real models that compute, to a given loss: the time under DDP and under tlsched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.record import LabRecord, spread
from tlsched.demo.cluster import Cluster
from tlsched.demo.job import Job, Result
from tlsched.errors import TrainingError
from tlsched.lab import Lab

HOSTS = 4
# Four ranks compute on one machine's processors: at this rate the network is the bottleneck that it
# is for GPUs on faster ones.
RATE_BPS = 400_000_000
POLICIES = ("ddp", "kernel")
MEAN_OF = 5  # iterations whose mean loss counts
ALIKE = 0.02  # of the loss: rounding, which training amplifies


@dataclass(frozen=True, slots=True)
class Model:
    """``part`` of a job, the loss to reach, and the iterations that are surely enough."""

    part: str
    target: float
    iterations: int


MODELS = {"digits CNN": Model("real", 0.1, 50), "transformer": Model("text", 2.7, 80)}


def measure(
    names: Sequence[str],
    rounds: int,
    step: Callable[[str], None],
    *,
    iterations: int | None = None,
    target: float | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a model and policy, and the lab; ``iterations``, ``target`` replace the models'."""
    rows: list[dict[str, Any]] = []
    with Lab(hosts=HOSTS, rate_bps=RATE_BPS) as lab, Cluster(lab) as cluster:
        described = LabRecord(lab)
        for name in names:
            model = MODELS[name]
            wanted = target or model.target
            runs: dict[str, list[list[Result]]] = {policy: [] for policy in POLICIES}
            for turn, policy in itertools.product(range(rounds), POLICIES):
                step(f"{name}, {policy}, round {turn + 1} of {rounds}")
                # All iterations count: whoever has to learn first spends that time too.
                job = Job(model.part, policy, iterations or model.iterations, warmup=0)
                runs[policy].append(cluster.train(job))
            _require_alike(name, runs)
            rows += _rows(name, wanted, runs)
        lab_record = described.close()
    return rows, lab_record


def reached(results: Sequence[Result], target: float) -> tuple[int, float]:
    """Iterations and seconds until the mean loss of all ranks over MEAN_OF is at most ``target``.

    Raises TrainingError when it never is.
    """
    means = _losses(results)
    for number in range(MEAN_OF, len(means) + 1):
        if fmean(means[number - MEAN_OF : number]) <= target:
            return number, results[0].startup_s + sum(results[0].iteration_s[:number])
    raise TrainingError(
        f"after {len(means)} iterations the loss is {fmean(means[-MEAN_OF:]):.3f}, not {target:g}",
        hint="give more iterations or a higher loss",
    )


def _losses(results: Sequence[Result]) -> list[float]:
    return [fmean(losses) for losses in zip(*(r.losses for r in results), strict=True)]


def _rows(name: str, target: float, runs: dict[str, list[list[Result]]]) -> list[dict[str, Any]]:
    found = {policy: [reached(results, target) for results in own] for policy, own in runs.items()}
    to_s = {policy: spread([seconds for _, seconds in own]) for policy, own in found.items()}
    return [
        {
            "bench": "real",
            "model": name,
            "policy": policy,
            "target": target,
            "iterations": found[policy][0][0],
            "to_loss_s": to_s[policy],
            "iteration_s": spread([s for run in runs[policy] for s in run[0].iteration_s]),
            "loss": fmean(_losses(runs[policy][-1])[-MEAN_OF:]),
            "accuracy": runs[policy][-1][0].accuracy,
            "over_ddp": to_s["ddp"]["median"] / to_s[policy]["median"],
        }
        for policy in POLICIES
    ]


def _require_alike(name: str, runs: dict[str, list[list[Result]]]) -> None:
    """Raise TrainingError unless the policies' losses are one another's."""
    curves = {policy: _losses(own[0]) for policy, own in runs.items()}
    for number, losses in enumerate(zip(*curves.values(), strict=True)):
        if max(losses) - min(losses) > ALIKE * max(*losses, 0.1):
            raise TrainingError(
                f"{name}: in iteration {number} the losses are {losses}",
                hint="its figures mean nothing: this is a fault of what was measured",
            )
