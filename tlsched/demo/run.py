"""The demonstration itself: which policies train what, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tlsched.demo.cluster import Cluster
from tlsched.demo.job import REPLAY_COMPUTE_S, REPLAY_MODEL, REPLAY_SCALE, Job, Result
from tlsched.demo.replay import gradient_bytes
from tlsched.lab import Lab
from tlsched.planning.fabric import Fabric

HOSTS = 4
RATE_BPS = 1_000_000_000
REAL_POLICIES = ("ddp", "kernel")
REPLAY_POLICIES = ("ddp", "lanes", "kernel")
REAL_ITERATIONS = 60
REPLAY_ITERATIONS = 10
TRACED_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy's seconds an iteration, all rounds together, and its last loss and accuracy."""

    part: str
    policy: str
    iteration_s: list[float]
    loss: float
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured, the floor of the replayed part, and a timeline a policy."""

    measured: list[Measured]
    floor_s: float
    timelines: dict[str, list[dict[str, float]]]


def steps(rounds: int) -> int:
    """How many trainings :func:`run_demo` makes."""
    return len(REAL_POLICIES) + len(REPLAY_POLICIES) * rounds + 2


def floor_s() -> float:
    """max(compute, communication): no schedule can make the replayed iteration shorter."""
    gradients = gradient_bytes(REPLAY_MODEL, REPLAY_SCALE)
    return max(REPLAY_COMPUTE_S, Fabric(HOSTS, RATE_BPS).seconds(gradients))


def run_demo(rounds: int, step: Callable[[str], None]) -> Outcome:
    """Train everything, calling ``step`` with a line before each training.

    In the replayed part the policies take turns, ``rounds`` times, so that a machine that slows
    down slows all of them.
    """
    with Lab(hosts=HOSTS, rate_bps=RATE_BPS) as lab, Cluster(lab) as cluster:
        measured = []
        for policy in REAL_POLICIES:
            step(f"digits, {policy}")
            results = cluster.train(Job("real", policy, REAL_ITERATIONS))
            measured.append(_measured("real", policy, [results]))
        by_policy: dict[str, list[list[Result]]] = {policy: [] for policy in REPLAY_POLICIES}
        for turn in range(rounds):
            for policy in REPLAY_POLICIES:
                step(f"replayed VGG-16, {policy}, round {turn + 1} of {rounds}")
                by_policy[policy].append(cluster.train(Job("replay", policy, REPLAY_ITERATIONS)))
        measured += [_measured("replay", policy, runs) for policy, runs in by_policy.items()]
        timelines = {}
        for policy in ("ddp", "kernel"):
            step(f"timeline, {policy}")
            traced = cluster.train(Job("replay", policy, TRACED_ITERATIONS, trace=True))
            timelines[policy] = traced[0].timeline
    return Outcome(measured, floor_s(), timelines)


def _measured(part: str, policy: str, runs: list[list[Result]]) -> Measured:
    """Rank 0's times: ranks advance together, since each needs the others' gradients."""
    return Measured(
        part,
        policy,
        [second for results in runs for second in results[0].iteration_s],
        runs[-1][0].loss,
        runs[-1][0].accuracy,
    )
