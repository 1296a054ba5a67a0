"""Seconds an iteration of a replayed shape under each policy, the policies taking turns.

Beside what was measured stands what the simulator says of the same model on the same fabric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.record import spread
from tlsched.demo.cluster import Cluster
from tlsched.demo.replay import gradient_bytes
from tlsched.demo.training import Job
from tlsched.lab import Lab
from tlsched.planning.compare import SIMULATED, as_trained, floor_s
from tlsched.planning.fabric import Fabric
from tlsched.planning.policies import Window
from tlsched.planning.profile import Profile
from tlsched.planning.tuning import ROUNDS_A_TRIAL, TRIALS
from tlsched.shapes.catalog import layers_of
from tlsched.shapes.derive import profile_of_layers

ITERATIONS = 10
TUNED = "bytescheduler"
# All of the tuning's windows, with the first rounds that it does not count.
TUNING_ITERATIONS = TRIALS * (ROUNDS_A_TRIAL + 2)
# Seconds that the gradients occupy a link: the shapes are scaled to it, so that a figure takes
# the same time to measure for all of them.
COMMUNICATION_S = 0.69


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained where: ``ratio`` is communication over computation, in seconds."""

    model: str
    ratio: float
    hosts: int
    rate_bps: int

    @property
    def scale(self) -> float:
        """What makes the gradients occupy a link for COMMUNICATION_S."""
        ideal = Fabric(self.hosts, self.rate_bps)  # the same model whatever a lab is measured to be
        return COMMUNICATION_S / ideal.seconds(gradient_bytes(self.model))

    @property
    def compute_s(self) -> float:
        """Seconds that an iteration computes."""
        return COMMUNICATION_S / self.ratio

    @property
    def profile(self) -> Profile:
        """What the replayed model computes and sends."""
        return profile_of_layers(layers_of(self.model), compute_s=self.compute_s, scale=self.scale)


@dataclass(slots=True)
class Measured:
    """What the runs of one policy gave: their iterations, and the last run's other figures."""

    times_s: list[float] = field(default_factory=list)
    window: Window | None = None
    messages: float | None = None


def measure(
    setting: Setting, policies: Sequence[str], rounds: int, step: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a policy, and a description of the lab that they were measured on.

    ``bytescheduler`` is tuned first, in a run of its own, and then measured with what was found.
    """
    measured = {policy: Measured() for policy in policies}
    with (
        Lab(hosts=setting.hosts, rate_bps=setting.rate_bps) as lab,
        Cluster(lab) as cluster,
    ):
        step(f"{setting.model}, what the links carry")
        fabric = calibrated(setting, cluster.train(Job("calibrate", "ddp", 0))[0].fabric)
        if TUNED in measured:
            step(f"{setting.model}, {TUNED} is tuned")
            _train(cluster, setting, TUNED, measured[TUNED], TUNING_ITERATIONS)
            measured[TUNED].times_s.clear()
        for turn in range(rounds):
            for policy in policies:
                step(f"{setting.model}, {policy}, round {turn + 1} of {rounds}")
                _train(cluster, setting, policy, measured[policy], ITERATIONS)
        description = lab.describe()
    return rows_of(setting, fabric, measured), description


def calibrated(setting: Setting, figures: dict[str, float]) -> Fabric:
    """The lab as it was measured in this very run."""
    ideal = Fabric(setting.hosts, setting.rate_bps, efficiency=1.0)
    efficiency = min(1.0, ideal.seconds(1) / figures["byte_s"])
    return replace(ideal, efficiency=efficiency, step_s=figures["step_s"])


def _train(
    cluster: Cluster, setting: Setting, policy: str, measured: Measured, iterations: int
) -> None:
    window = measured.window
    job = Job(
        "replay",
        policy,
        iterations,
        compute_s=setting.compute_s,
        scale=setting.scale,
        model=setting.model,
        window=(window.partition_bytes, window.credit_bytes) if window else None,
    )
    result = cluster.train(job)[0]
    measured.times_s += result.iteration_s
    measured.messages = result.messages
    if result.window is not None:
        measured.window = Window(*result.window)


def rows_of(
    setting: Setting, fabric: Fabric, measured: dict[str, Measured]
) -> list[dict[str, Any]]:
    """Rows with what was measured, its bounds, and what the simulator says."""
    profile = setting.profile
    oracle_s = as_trained(profile, fabric, "oracle").iteration_s
    return [
        {
            "bench": "step",
            "model": setting.model,
            "hosts": setting.hosts,
            "rate_bps": setting.rate_bps,
            "ratio": setting.ratio,
            "backend": "allreduce",
            "policy": policy,
            "iteration_s": spread(found.times_s),
            "floor_s": floor_s(profile, fabric),
            "oracle_s": oracle_s,
            "simulated_s": _simulated_s(profile, fabric, policy, found.window),
            "efficiency": fabric.efficiency,
            "step_s": fabric.step_s,
            "messages": found.messages,
            "window": asdict(found.window) if found.window else None,
        }
        for policy, found in measured.items()
    ]


def _simulated_s(
    profile: Profile, fabric: Fabric, policy: str, window: Window | None
) -> float | None:
    if policy not in SIMULATED:
        return None
    return as_trained(profile, fabric, policy, window=window).iteration_s
