"""What tlsched costs where it cannot help: communication a tenth of the compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import trainings
from bench.record import LabRecord, spread
from tlsched.demo.cluster import Cluster
from tlsched.demo.job import Job, Result
from tlsched.demo.run import HOSTS, RATE_BPS
from tlsched.lab import Lab

POLICIES = ("ddp", "kernel")
# A hundredth of VGG-16: 5.5 MB of gradients, 69 ms on the link.
SCALE = 0.01
COMPUTE_S = 0.69
ITERATIONS = 20


def measure(
    rounds: int, step: Callable[[str], None], *, iterations: int = ITERATIONS
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a policy: what its iterations, its start and its memory cost; and the lab.

    The policies take turns, in which seconds and processor time are read. Memory is a process's
    peak, so each policy's is read from ranks that ran no other, on the larger model of the step
    benchmark.
    """
    turns: dict[str, list[Result]] = {policy: [] for policy in POLICIES}
    peaks: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with Lab(hosts=HOSTS, rate_bps=RATE_BPS) as lab:
        described = LabRecord(lab)
        with Cluster(lab) as cluster:
            done = []
            for turn in range(rounds):
                for policy in POLICIES:
                    step(f"{policy}, round {turn + 1} of {rounds}")
                    job = Job("replay", policy, iterations, compute_s=COMPUTE_S, scale=SCALE)
                    done.append((job, cluster.train(job)))
                    turns[policy] += done[-1][1]
            trainings.require_alike(done)
        for policy in POLICIES:
            with Cluster(lab) as cluster:
                step(f"memory, {policy}")
                results = cluster.train(Job("replay", policy, 4))
                peaks[policy] = [result.peak_bytes / 2**20 for result in results]
        lab_record = described.close()
    return [_row(policy, turns, peaks[policy]) for policy in POLICIES], lab_record


def _row(policy: str, turns: dict[str, list[Result]], peaks: list[float]) -> dict[str, Any]:
    own = turns[policy]
    seconds = {name: spread([s for r in turns[name] for s in r.iteration_s]) for name in POLICIES}
    return {
        "policy": policy,
        "iteration_s": seconds[policy],
        "of_ddp": seconds["ddp"]["median"] / seconds[policy]["median"],
        "cpu_ms": spread([result.cpu_s * 1000 for result in own]),
        "startup_s": spread([result.startup_s for result in own]),
        "peak_mib": spread(peaks),
    }
