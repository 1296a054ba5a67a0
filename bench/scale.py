"""More hosts: measured as far as the lab goes, simulated beyond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench import step as step_bench
from bench.step import Setting
from tlsched.planning.compare import as_trained, floor_s

MEASURED = (2, 4, 8)
SIMULATED = (16, 32, 64, 128, 256, 512, 1024)
POLICIES = ("ddp", "kernel")
# Eight hosts share one machine's processors: at a lower rate they do not become what is measured.
RATE_BPS = 400_000_000
ITERATIONS = 8


def measure(
    measured: Sequence[int],
    rounds: int,
    step: Callable[[str], None],
    *,
    iterations: int = ITERATIONS,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a number of hosts and policy, and the largest lab."""
    rows: list[dict[str, Any]] = []
    lab: dict[str, Any] = {}
    for hosts in (*measured, *SIMULATED):
        setting = Setting("vgg16", 1.0, hosts, RATE_BPS)
        times: dict[str, Any] = {}
        if hosts in measured:
            found, lab = step_bench.measure(setting, POLICIES, rounds, step, iterations=iterations)
            times = {row["policy"]: row["iteration_s"] for row in found}
        rows += _rows(setting, times)
    return rows, lab


def _rows(setting: Setting, times: dict[str, Any]) -> list[dict[str, Any]]:
    profile, fabric = setting.profile, setting.fabric
    simulated = {policy: as_trained(profile, fabric, policy) for policy in POLICIES}
    return [
        {
            "bench": "scale",
            "hosts": setting.hosts,
            "policy": policy,
            "iteration_s": times.get(policy),
            "simulated_s": simulated[policy].iteration_s,
            "floor_s": floor_s(profile, fabric),
        }
        for policy in POLICIES
    ]
