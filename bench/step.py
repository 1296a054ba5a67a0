"""Seconds an iteration of a replayed shape under each policy, the policies taking turns.

Beside what was measured stands what the simulator says of the same model on the same fabric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.record import spread
from tlsched.demo.cluster import Cluster
from tlsched.demo.replay import gradient_bytes
from tlsched.demo.training import Job
from tlsched.lab import Lab
from tlsched.planning.compare import SIMULATED, expect, floor_s
from tlsched.planning.fabric import Fabric, lab_fabric
from tlsched.planning.profile import Profile
from tlsched.shapes.catalog import layers_of
from tlsched.shapes.derive import profile_of_layers

ITERATIONS = 10
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
    def fabric(self) -> Fabric:
        """The lab, as the simulator sees it."""
        return lab_fabric(self.hosts, self.rate_bps)

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


def measure(
    setting: Setting, policies: Sequence[str], rounds: int, step: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a policy, and a description of the lab that they were measured on."""
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    with (
        Lab(hosts=setting.hosts, rate_bps=setting.rate_bps) as lab,
        Cluster(lab) as cluster,
    ):
        for turn in range(rounds):
            for policy in policies:
                step(f"{setting.model}, {policy}, round {turn + 1} of {rounds}")
                job = Job(
                    "replay",
                    policy,
                    ITERATIONS,
                    compute_s=setting.compute_s,
                    scale=setting.scale,
                    model=setting.model,
                )
                times[policy] += cluster.train(job)[0].iteration_s
        description = lab.describe()
    return rows_of(setting, times), description


def rows_of(setting: Setting, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Rows with what was measured, its bounds, and what the simulator says."""
    profile, fabric = setting.profile, setting.fabric
    simulated = expect(profile, fabric, [*(p for p in times if p in SIMULATED), "oracle"])
    return [
        {
            "bench": "step",
            "model": setting.model,
            "hosts": setting.hosts,
            "rate_bps": setting.rate_bps,
            "ratio": setting.ratio,
            "backend": "allreduce",
            "policy": policy,
            "iteration_s": spread(values),
            "floor_s": floor_s(profile, fabric),
            "oracle_s": simulated["oracle"].iteration_s,
            "simulated_s": simulated[policy].iteration_s if policy in simulated else None,
        }
        for policy, values in times.items()
    ]
