"""What every result carries: where, when and with which versions it was measured."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tlsched
from tlsched.lab import Lab, describe

_PACKAGES = ("torch", "numpy", "pyroute2")


def environment() -> dict[str, Any]:
    """Kernel, processors, sysctls, versions, date and commit ("+": files differ from it)."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("describe", "--always", "--dirty=+", "--abbrev=12"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "tlsched": tlsched.__version__,
        "packages": {name: version(name) for name in _PACKAGES},
        "sysctls": describe.sysctls(),
    }


class LabRecord:
    """A lab as a result tells of it: its settings, and its counters before and after."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._before = lab.counters()

    def close(self) -> dict[str, Any]:
        """The record. Of hosts, which are alike, the first one's settings stand for all."""
        found = self._lab.describe()
        first, switch = found.pop("hosts")[0], found.pop("switch")
        sides = {"host": first | _settings(first), "switch": _settings(switch)}
        counters = {"before": self._before, "after": self._lab.counters()}
        return {**found, "host_count": len(self._lab.hosts), **sides, "counters": counters}


def _settings(side: dict[str, Any]) -> dict[str, Any]:
    """Links and qdiscs without what a namespace of the same make may have otherwise."""
    names = ("ifname", "mtu", "txqlen", "num_tx_queues", "gso_max_size", "gro_max_size")
    return {
        "links": [{name: link[name] for name in names if name in link} for link in side["links"]],
        "qdiscs": [
            {name: qdisc[name] for name in ("kind", "handle", "dev", "options") if name in qdisc}
            for qdisc in side["qdiscs"]
        ],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least, greatest and number of ``values``."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def tail(values: Sequence[float]) -> dict[str, float]:
    """:func:`spread` with mean and 99th percentile (the nearest rank's)."""
    last = sorted(values)[math.ceil(0.99 * len(values)) - 1]
    return {**spread(values), "mean": statistics.fmean(values), "p99": last}


def save(path: Path | None, bench: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write a result as JSON, with the environment; nothing without a path."""
    if path is not None:
        result = {"bench": bench, "environment": environment(), **more, "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return done.stdout.strip() or "unknown"
