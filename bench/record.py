"""What every result carries: where, when and with which versions it was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "pyroute2")


def environment() -> dict[str, Any]:
    """Kernel, processors, load, versions, date and commit (with "+" when files differ from it)."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("describe", "--always", "--dirty=+", "--abbrev=12"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least, greatest and number of ``values``."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def save(path: Path | None, bench: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write a result as JSON, with the environment; nothing without a path."""
    if path is not None:
        result = {"bench": bench, "environment": environment(), **more, "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return done.stdout.strip() or "unknown"
