"""Seconds an iteration of the replayed model under each policy, the policies taking turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.record import spread
from tlsched.demo.cluster import Cluster
from tlsched.demo.run import HOSTS, RATE_BPS, floor_s
from tlsched.demo.training import Job
from tlsched.lab import Lab

ITERATIONS = 10


def measure(
    policies: Sequence[str], rounds: int, step: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a policy, and a description of the lab that they were measured on."""
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    with Lab(hosts=HOSTS, rate_bps=RATE_BPS) as lab, Cluster(lab) as cluster:
        for turn in range(rounds):
            for policy in policies:
                step(f"{policy}, round {turn + 1} of {rounds}")
                results = cluster.train(Job("replay", policy, ITERATIONS))
                times[policy] += results[0].iteration_s
        description = lab.describe()
    rows = [
        {
            "bench": "step",
            "model": "vgg16 at a tenth",
            "hosts": HOSTS,
            "rate_bps": RATE_BPS,
            "backend": "allreduce",
            "policy": policy,
            "iteration_s": spread(values),
            "floor_s": floor_s(),
        }
        for policy, values in times.items()
    ]
    return rows, description
