"""Seconds an iteration of a replayed shape under each policy, the policies taking turns.

Beside what was measured stands what the simulator says of the same model on the same fabric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from bench import trainings
from bench.record import LabRecord, spread
from tlsched.demo.cluster import Cluster
from tlsched.demo.job import Job
from tlsched.demo.replay import gradient_bytes
from tlsched.demo.servers import Servers
from tlsched.lab import Lab
from tlsched.planning.compare import SIMULATED, as_trained, floor_s
from tlsched.planning.fabric import Fabric
from tlsched.planning.policies import Window
from tlsched.planning.profile import Profile
from tlsched.shapes.catalog import layers_of
from tlsched.shapes.derive import profile_of_layers

ITERATIONS = 6
# Seconds that the gradients occupy a link: the shapes are scaled to it, so that a figure takes
# the same time to measure for all of them.
COMMUNICATION_S = 1.38


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained where: ``ratio`` is communication over computation, in seconds.

    With ``backend`` "ps", ``servers`` hosts beside the others are parameter servers; with 0 of them
    there is one beside every worker.
    """

    model: str
    ratio: float
    hosts: int
    rate_bps: int
    communication_s: float = COMMUNICATION_S
    backend: Literal["allreduce", "ps"] = "allreduce"
    servers: int = 0

    @property
    def fabric(self) -> Fabric:
        """The links as they should be; the same whatever a lab is measured to be."""
        return Fabric(self.hosts, self.rate_bps, backend=self.backend, servers=self.servers)

    @property
    def server_hosts(self) -> range:
        """The numbers of the lab's hosts that have a parameter server."""
        if self.backend != "ps":
            return range(0)
        return range(self.hosts, self.hosts + self.servers) if self.servers else range(self.hosts)

    @property
    def scale(self) -> float:
        """What makes the gradients occupy a link for ``communication_s``."""
        return self.communication_s / self.fabric.seconds(gradient_bytes(self.model))

    @property
    def compute_s(self) -> float:
        """Seconds that an iteration computes."""
        return self.communication_s / self.ratio

    @property
    def profile(self) -> Profile:
        """What the replayed model computes and sends."""
        return profile_of_layers(layers_of(self.model), compute_s=self.compute_s, scale=self.scale)


@dataclass(slots=True)
class Measured:
    """What the runs of one policy gave: their iterations, and the all-reduces of one."""

    job: Job
    times_s: list[float] = field(default_factory=list)
    messages: float | None = None

    @property
    def window(self) -> Window | None:
        """The one that ``bytescheduler`` was measured with."""
        return Window(*self.job.window) if self.job.window else None


def measure(
    setting: Setting,
    policies: Sequence[str],
    rounds: int,
    step: Callable[[str], None],
    *,
    iterations: int = ITERATIONS,
    quick: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a policy, and a description of the lab that they were measured on.

    What has a knob (DDP's bucket size, ``bytescheduler``'s window) is tuned first, in runs of their
    own, and then measured with what was found.
    """
    with (
        Lab(hosts=setting.hosts + setting.servers, rate_bps=setting.rate_bps) as lab,
        Servers(lab, setting.server_hosts) as servers,
        Cluster(lab, hosts=setting.hosts) as cluster,
    ):
        described = LabRecord(lab)
        step(f"{setting.model}, what the links carry")
        fabric = calibrate(setting, cluster)
        measured = {}
        for policy in policies:
            step(f"{setting.model}, {policy}, its knobs")
            wanted = replace(trainings.job(setting, policy, iterations), servers=servers.addresses)
            measured[policy] = Measured(trainings.at_its_best(cluster, wanted, quick=quick))
        done = []
        for turn in range(rounds):
            for policy, found in measured.items():
                step(f"{setting.model}, {policy}, round {turn + 1} of {rounds}")
                results = cluster.train(found.job)
                done.append((found.job, results))
                found.times_s += results[0].iteration_s
                found.messages = results[0].messages
        trainings.require_alike(done)
        description = described.close()
    return rows_of(setting, fabric, measured), description


def calibrate(setting: Setting, cluster: Cluster) -> Fabric:
    """What the links of ``cluster`` carry just now."""
    return calibrated(setting, cluster.train(Job("calibrate", "ddp", 0))[0].fabric)


def calibrated(setting: Setting, figures: dict[str, float]) -> Fabric:
    """The lab as it was measured in this very run, with a ring."""
    ring = Fabric(setting.hosts, setting.rate_bps, efficiency=1.0)
    efficiency = min(1.0, ring.seconds(1) / figures["byte_s"])
    return replace(setting.fabric, efficiency=efficiency, step_s=figures["step_s"])


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
            "backend": setting.backend,
            "servers": setting.servers,
            "policy": policy,
            "iteration_s": spread(found.times_s),
            "floor_s": floor_s(profile, fabric),
            "oracle_s": oracle_s,
            "simulated_s": _simulated_s(profile, fabric, policy, found.window),
            "efficiency": fabric.efficiency,
            "step_s": fabric.step_s,
            "messages": found.messages,
            "window": asdict(found.window) if found.window else None,
            "bucket_cap_mb": found.job.bucket_cap_mb,
        }
        for policy, found in measured.items()
    ]


def _simulated_s(
    profile: Profile, fabric: Fabric, policy: str, window: Window | None
) -> float | None:
    if policy not in SIMULATED:
        return None
    return as_trained(profile, fabric, policy, window=window).iteration_s
