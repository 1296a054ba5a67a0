"""TCP's congestion controls under strict bands, where a starved lane has to recover at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench import trainings
from bench.record import LabRecord, spread
from bench.step import Setting
from tlsched.demo.cluster import Cluster
from tlsched.lab import Lab, congestion

WANTED = ("cubic", "bbr", "reno")
SETTING = Setting("vgg16", 1.0, 4, 1_000_000_000)
ITERATIONS = 10


def measure(
    rounds: int,
    step: Callable[[str], None],
    *,
    setting: Setting = SETTING,
    iterations: int = ITERATIONS,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row for each of WANTED that the kernel has, all under the policy kernel; and the lab."""
    names = present()
    times: dict[str, list[float]] = {name: [] for name in names}
    with Lab(hosts=setting.hosts, rate_bps=setting.rate_bps) as lab, Cluster(lab) as cluster:
        described = LabRecord(lab)
        done = []
        for turn in range(rounds):
            for name in names:
                step(f"{name}, round {turn + 1} of {rounds}")
                lab.set_congestion(name)  # for what is opened from now on, as lanes are
                job = trainings.job(setting, "kernel", iterations)
                done.append((job, cluster.train(job)))
                times[name] += done[-1][1][0].iteration_s
        trainings.require_alike(done)
        lab_record = described.close()
    rows = [
        {"bench": "congestion", "congestion": name, "policy": "kernel", "iteration_s": spread(own)}
        for name, own in times.items()
    ]
    return rows, lab_record


def present() -> Sequence[str]:
    """Those of WANTED that this kernel has loaded or built in."""
    return [name for name in WANTED if name in congestion.available()]
