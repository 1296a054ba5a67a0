"""Seconds that the simulator and the planner take, for a cluster as large as they are meant for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.record import spread
from tlsched.planning.fabric import Fabric
from tlsched.planning.fusing import plan_on
from tlsched.planning.planner import plan_for
from tlsched.planning.policies import PolicySettings, make_policy
from tlsched.planning.policies.oracle import oracle
from tlsched.planning.profile import BucketProfile, Profile
from tlsched.planning.simulate import simulate

SIZES = ((64, 200), (1024, 400))  # hosts, buckets
POLICIES = ("fifo", "bytescheduler", "prophet", "lanes", "kernel", "oracle")
BUCKET_BYTES = 4_000_000
STEP_S = 1e-6
SLOWEST = 1.1  # of the hosts, each of which computes at a speed of its own


def measure(rounds: int, *, sizes: int) -> list[dict[str, Any]]:
    """A row for each size and policy, and for the planner: one iteration simulated, or one plan.

    The first ``sizes`` of SIZES.
    """
    rows = []
    for hosts, buckets in SIZES[:sizes]:
        fabric = _fabric(hosts)
        profile = _profile(buckets, fabric)
        jobs = {name: _iteration(name, profile, fabric) for name in POLICIES}
        jobs["planner"] = lambda profile=profile, fabric=fabric: plan_for(profile, fabric)  # type: ignore[misc]  # bound now
        for what, job in jobs.items():
            times = [_timed(job) for _ in range(rounds)]
            rows.append(
                {
                    "bench": "simulator",
                    "hosts": hosts,
                    "buckets": buckets,
                    "what": what,
                    "seconds": spread(times),
                }
            )
    return rows


def _timed(job: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    job()
    return time.perf_counter() - begin_s


def _fabric(hosts: int) -> Fabric:
    factors = tuple(1 + (SLOWEST - 1) * host / hosts for host in range(hosts))
    return Fabric(hosts, 100e9, step_s=STEP_S, compute_factors=factors)


def _profile(count: int, fabric: Fabric) -> Profile:
    """Equal layers whose communication takes as long as their computing."""
    compute_s = fabric.seconds(count * BUCKET_BYTES)
    forward_s, backward_s = compute_s / 3, compute_s * 2 / 3
    buckets = tuple(
        BucketProfile((f"p{i}",), BUCKET_BYTES, backward_s * (1 - i / count), forward_s * i / count)
        for i in range(count)
    )
    return Profile(buckets, forward_s, backward_s)


def _iteration(name: str, profile: Profile, fabric: Fabric) -> Callable[[], object]:
    count = len(profile.buckets)
    plan = plan_on(profile, [i * 6 // count for i in range(count)], profile.launch_order)
    settings = PolicySettings(profile=profile, fabric=fabric)
    policy = oracle(plan) if name == "oracle" else make_policy(name, plan, settings)
    return lambda: simulate(profile, policy, fabric, iterations=1)
