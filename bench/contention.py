"""Training beside bulk TCP flows: what it loses, what they get, how much of the links is used."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bench import trainings
from bench.bulk import BulkFlows
from bench.record import LabRecord, spread
from bench.step import Setting
from tlsched.demo.cluster import Cluster
from tlsched.demo.job import Job, Result
from tlsched.lab import Lab

FLOWS = (0, 1, 4, 16)
# A third of `step`'s: beside 16 flows DDP gets a seventeenth of the link.
SETTING = Setting("vgg16", 1.0, 4, 1_000_000_000, communication_s=0.23)
ITERATIONS = 8


@dataclass(slots=True)
class _Case:
    """What was measured of a policy beside so many flows, all rounds together."""

    iteration_s: list[float] = field(default_factory=list)
    bulk_bps: list[float] = field(default_factory=list)
    link_use: list[float] = field(default_factory=list)


def measure(
    policies: Sequence[str],
    flows: Sequence[int],
    rounds: int,
    step: Callable[[str], None],
    *,
    setting: Setting = SETTING,
    iterations: int = ITERATIONS,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a number of flows and policy, and the lab. ``flows`` begins with 0."""
    cases = {(count, policy): _Case() for count in flows for policy in policies}
    done: list[tuple[Job, list[Result]]] = []
    with Lab(hosts=setting.hosts, rate_bps=setting.rate_bps) as lab, Cluster(lab) as cluster:
        described = LabRecord(lab)
        cluster.train(Job("calibrate", "ddp", 0))  # the workers' own start is not to be measured
        for turn in range(rounds):
            for (count, policy), case in cases.items():
                step(f"{policy} beside {count} flows, round {turn + 1} of {rounds}")
                job = trainings.job(setting, policy, iterations)
                done.append((job, _train(lab, cluster, job, count, case)))
        trainings.require_alike(done)
        lab_record = described.close()
    return [_row(count, policy, cases) for count, policy in cases], lab_record


def _train(lab: Lab, cluster: Cluster, job: Job, flows: int, case: _Case) -> list[Result]:
    """``job`` beside ``flows``; what it and they got, while it trained, goes to ``case``."""
    cluster.links.order(ordered=job.policy == "kernel")
    with BulkFlows(lab, flows) as bulk:
        before, begin_s = lab.counters(), time.monotonic()
        results = cluster.train(job)
        after, end_s = lab.counters(), time.monotonic()
    sent = [after[host.name]["bytes"] - before[host.name]["bytes"] for host in lab.hosts]
    case.link_use.append(fmean(sent) * 8 / (end_s - begin_s) / lab.rate_bps)
    case.bulk_bps.append(bulk.rate_bps(begin_s, end_s))
    case.iteration_s += results[0].iteration_s
    return results


def _row(flows: int, policy: str, cases: dict[tuple[int, str], _Case]) -> dict[str, Any]:
    case = cases[flows, policy]
    alone, beside = spread(cases[0, policy].iteration_s), spread(case.iteration_s)
    return {
        "bench": "contention",
        "flows": flows,
        "policy": policy,
        "iteration_s": beside,
        "kept": alone["median"] / beside["median"],
        "bulk_bps": fmean(case.bulk_bps),
        "link_use": fmean(case.link_use),
    }
