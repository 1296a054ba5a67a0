"""Links whose rate falls and rises again while a training runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import trainings
from bench.record import LabRecord, spread
from bench.step import Setting
from bench.two_jobs import spans
from tlsched.demo.cluster import Cluster
from tlsched.demo.job import Result
from tlsched.errors import TrainingError
from tlsched.lab import Lab
from tlsched.planning.compare import as_trained

RATES_BPS = (1_000_000_000, 400_000_000, 1_000_000_000)
SETTING = Setting("vgg16", 1.0, 4, RATES_BPS[0], communication_s=0.3)
PHASE_S = 8.0
# Seconds that a training may take until its first timed iteration, beside its iterations.
_START_S = 2.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A time in which the links have one rate, by CLOCK_MONOTONIC."""

    rate_bps: int
    begin_s: float
    end_s: float


def measure(
    policies: Sequence[str],
    rounds: int,
    step: Callable[[str], None],
    *,
    setting: Setting = SETTING,
    phase_s: float = PHASE_S,
    quick: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a policy and phase, with the simulator's oracle at the phase's rate, and the lab."""
    found: dict[tuple[str, int], list[float]] = {}
    with Lab(hosts=setting.hosts, rate_bps=setting.rate_bps) as lab, Cluster(lab) as cluster:
        described = LabRecord(lab)
        jobs = {}
        for policy in policies:
            step(f"{policy}, its knobs")
            wanted = trainings.job(setting, policy, _iterations(setting, phase_s))
            jobs[policy] = trainings.at_its_best(cluster, wanted, quick=quick)
        done = []
        for turn in range(rounds):
            for policy, job in jobs.items():
                step(f"{policy}, round {turn + 1} of {rounds}")
                cluster.links.order(ordered=policy == "kernel")
                cluster.begin(job)
                phases = _change(cluster, setting, job.warmup, phase_s)
                done.append((job, cluster.results(job)))
                for number, phase in enumerate(phases):
                    inside = within(done[-1][1][0], phase)
                    found.setdefault((policy, number), []).extend(inside)
        trainings.require_alike(done)
        if not all(found.values()):
            raise TrainingError(
                "a training ended before the links had changed twice",
                hint="the machine is too busy for this: try again when it is not",
            )
        lab_record = described.close()
    oracles = [_oracle_s(setting, rate_bps) for rate_bps in RATES_BPS]
    rows = [
        {
            "bench": "rate-change",
            "policy": policy,
            "phase": number + 1,
            "rate_bps": RATES_BPS[number],
            "iteration_s": spread(times),
            "oracle_s": oracles[number],
            **trainings.knobs(jobs[policy]),
        }
        for (policy, number), times in found.items()
    ]
    return rows, lab_record


def within(result: Result, phase: Phase) -> list[float]:
    """The iterations that lie in ``phase``, without the first, which began before it."""
    return [b - a for a, b in spans(result) if phase.begin_s <= a and b <= phase.end_s]


def _change(cluster: Cluster, setting: Setting, warmup: int, phase_s: float) -> list[Phase]:
    """Wait out the warm-up, then give the links each rate for ``phase_s``."""
    time.sleep(_START_S + warmup * (setting.compute_s + setting.communication_s))
    phases = []
    for number, rate_bps in enumerate(RATES_BPS):
        if number:
            cluster.links.set_rate(rate_bps)
        begin_s = time.monotonic()
        time.sleep(phase_s)
        phases.append(Phase(rate_bps, begin_s, time.monotonic()))
    # Whatever is left of it belongs to the last phase.
    return [*phases[:-1], replace(phases[-1], end_s=float("inf"))]


def _iterations(setting: Setting, phase_s: float) -> int:
    """As many as the fastest policy makes in all phases, and some more."""
    slowest_s = setting.communication_s * setting.rate_bps / min(RATES_BPS)
    floor_s = max(setting.compute_s, setting.communication_s)
    full = (len(RATES_BPS) - 1) * phase_s + 5 * _START_S  # a change takes a second or two
    return round(1.1 * (full / floor_s + phase_s / max(setting.compute_s, slowest_s)))


def _oracle_s(setting: Setting, rate_bps: int) -> float:
    fabric = replace(setting.fabric, rate_bps=rate_bps)
    return as_trained(setting.profile, fabric, "oracle").iteration_s
