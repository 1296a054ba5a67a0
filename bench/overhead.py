"""What tlsched costs where it cannot help: communication a tenth of the compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.record import spread
from tlsched.demo.cluster import Cluster
from tlsched.demo.run import HOSTS, RATE_BPS
from tlsched.demo.training import Job
from tlsched.lab import Lab

POLICIES = ("ddp", "kernel")
# A hundredth of VGG-16: 5.5 MB of gradients, 69 ms on the link.
SCALE = 0.01
COMPUTE_S = 0.69
ITERATIONS = 20


def measure(rounds: int, step: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row a policy: seconds an iteration, the policies taking turns, and peak memory.

    Memory is a process's peak, so each policy's is read from ranks that ran no other, on the
    larger model of the step benchmark.
    """
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    peaks: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with Lab(hosts=HOSTS, rate_bps=RATE_BPS) as lab:
        with Cluster(lab) as cluster:
            for turn in range(rounds):
                for policy in POLICIES:
                    step(f"{policy}, round {turn + 1} of {rounds}")
                    job = Job("replay", policy, ITERATIONS, compute_s=COMPUTE_S, scale=SCALE)
                    times[policy] += cluster.train(job)[0].iteration_s
        for policy in POLICIES:
            with Cluster(lab) as cluster:
                step(f"memory, {policy}")
                results = cluster.train(Job("replay", policy, 4))
                peaks[policy] = [result.peak_bytes / 2**20 for result in results]
    return [
        {
            "policy": policy,
            "iteration_s": spread(times[policy]),
            "of_ddp": spread(times["ddp"])["median"] / spread(times[policy])["median"],
            "peak_mib": spread(peaks[policy]),
        }
        for policy in POLICIES
    ]
