"""Results as PNG charts, each of which carries the digest of the rows that it shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from bench.ratios import Row

KEY = "Source"  # of the PNG's text: the rows' digest


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the chart of ``result``, whose benchmark is one of CHARTS."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    CHARTS[result["bench"]](axes, result["rows"])
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=8, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={KEY: digest(result), "Software": "bench"})


def digest(result: dict[str, Any]) -> str:
    """What tells these rows from others."""
    return hashlib.sha256(json.dumps(result["rows"], sort_keys=True).encode()).hexdigest()


def shows(path: Path, result: dict[str, Any]) -> bool:
    """Whether ``path`` is a chart of ``result``'s rows."""
    if not path.exists():
        return False
    with Image.open(path) as image:
        return image.info.get(KEY) == digest(result)


def _step(axes: Axes, rows: list[Row]) -> None:
    groups = [f"{model}\nratio {ratio:g}" for model, ratio in _cases(rows, "model", "ratio")]
    heights = {
        policy: [
            _find(rows, lambda r: r["oracle_s"] / r["iteration_s"]["median"], policy, place)
            for place in _cases(rows, "model", "ratio")
        ]
        for policy in _policies(rows)
    }
    _bars(axes, groups, heights)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("oracle / measured")


def _contention(axes: Axes, rows: list[Row]) -> None:
    for policy in _policies(rows):
        own = [row for row in rows if row["policy"] == policy]
        seconds = [row["iteration_s"]["median"] for row in own]
        axes.plot([str(row["flows"]) for row in own], seconds, marker="o", label=policy)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bulk TCP flows a host")
    axes.set_ylabel("s/iteration")


def _rate_change(axes: Axes, rows: list[Row]) -> None:
    policies = _policies(rows)
    first = [row for row in rows if row["policy"] == policies[0]]
    groups = [f"{row['phase']}: {row['rate_bps'] / 1e6:.0f} Mbit/s" for row in first]
    heights = {
        policy: [row["iteration_s"]["median"] for row in rows if row["policy"] == policy]
        for policy in policies
    }
    _bars(axes, groups, heights | {"oracle": [row["oracle_s"] for row in first]})
    axes.set_ylabel("s/iteration")


def _scale(axes: Axes, rows: list[Row]) -> None:
    for policy in _policies(rows):
        own = [row for row in rows if row["policy"] == policy]
        hosts, simulated = [row["hosts"] for row in own], [row["simulated_s"] for row in own]
        (line,) = axes.plot(hosts, simulated, label=f"{policy}, simulated")
        measured = [(r["hosts"], r["iteration_s"]["median"]) for r in own if r["iteration_s"]]
        if measured:
            points = list(zip(*measured, strict=True))
            axes.plot(*points, "o", color=line.get_color(), label=f"{policy}, measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks(hosts, [str(count) for count in hosts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hosts")
    axes.set_ylabel("s/iteration")


def _bars(axes: Axes, groups: Sequence[str], heights: dict[str, list[float]]) -> None:
    """A group of bars for each of ``groups``, a bar in each of them for a key of ``heights``."""
    width = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        left = [place - 0.4 + (number + 0.5) * width for place in range(len(groups))]
        axes.bar(left, values, width, label=name)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)


def _policies(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _cases(rows: Iterable[Row], *keys: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def _find(
    rows: Iterable[Row], figure: Callable[[Row], float], policy: str, place: tuple[Any, ...]
) -> float:
    """``figure`` of the row of ``policy`` at ``place`` (model, ratio); 0 without one: no bar."""
    for row in rows:
        if row["policy"] == policy and (row["model"], row["ratio"]) == place:
            return figure(row)
    return 0.0


CHARTS: dict[str, Callable[[Axes, list[Row]], None]] = {
    "step": _step,
    "contention": _contention,
    "rate-change": _rate_change,
    "scale": _scale,
}
