"""The ratios of a result: what can be compared between two runs, and machines.

Seconds depend on the machine and its day, ratios of figures that were measured in turns hardly do.
All are the better the higher they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlsched.errors import ConfigError

Row = dict[str, Any]
DDP = ("ddp", "ddp-best")  # torch's own, with its default and with its best bucket size


@dataclass(frozen=True, slots=True)
class Ratio:
    """``what`` of ``case``, for instance "of oracle" of "vgg16, ratio 1, kernel"."""

    bench: str
    case: str
    what: str
    value: float


def load(path: Path) -> dict[str, Any]:
    """A result. Raises ConfigError when there is none in ``path``."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", hint="give a result") from None
    if not isinstance(result, dict) or "rows" not in result:
        raise ConfigError(f"{path} is no result of a benchmark", hint="see bench/results")
    return result


def of(result: dict[str, Any]) -> list[Ratio]:
    """All ratios of ``result``; none for benchmarks that measure seconds only."""
    name, rows = result["bench"], result["rows"]
    found = _RATIOS.get(name)
    return [] if found is None else [Ratio(name, *one) for one in found(rows)]


def over_ddp(row: Row, rows: list[Row], same: tuple[str, ...]) -> float | None:
    """How often ``row`` is as fast as DDP at its best with the same ``same``; None without DDP."""
    alike = [r for r in rows if r["policy"] in DDP and all(r.get(k) == row.get(k) for k in same)]
    times = [float(other["iteration_s"]["median"]) for other in alike if other["iteration_s"]]
    return min(times) / float(row["iteration_s"]["median"]) if times else None


STEP_CASE = ("model", "ratio", "hosts", "rate_bps", "backend")


def _step(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    for row in rows:
        case = f"{row['model']}, ratio {row['ratio']:g}, {row['hosts']} hosts, {row['backend']}, "
        case += str(row["policy"])
        yield case, "of oracle", row["oracle_s"] / row["iteration_s"]["median"]
        gain = over_ddp(row, rows, STEP_CASE)
        if gain is not None and row["policy"] not in DDP:
            yield case, "over ddp", gain


def _contention(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    for row in rows:
        case = f"{row['policy']}, {row['flows']} flows"
        if row["flows"]:
            yield case, "kept speed", row["kept"]
            yield case, "link use", row["link_use"]


def _two_jobs(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    for row in rows:
        if row["variant"] != "alone":
            case = f"{row['scenario']}, {row['variant']}, job {row['job']}"
            yield case, "of alone, mean", row["alone"]["mean"] / row["iteration_s"]["mean"]


def _rate_change(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    for row in rows:
        case = f"{row['policy']}, phase {row['phase']}"
        yield case, "of oracle", row["oracle_s"] / row["iteration_s"]["median"]


def _scale(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    for row in rows:
        if row["policy"] not in DDP and row["iteration_s"]:
            gain = over_ddp(row, rows, ("hosts",))
            if gain is not None:
                yield f"{row['policy']}, {row['hosts']} hosts", "over ddp", gain


def _congestion(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    best = min(row["iteration_s"]["median"] for row in rows)
    for row in rows:
        yield row["congestion"], "of best", best / row["iteration_s"]["median"]


def _real(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    for row in rows:
        if row["policy"] != "ddp":
            yield f"{row['model']}, {row['policy']}", "over ddp", row["over_ddp"]


def _overhead(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    (ddp,) = (row for row in rows if row["policy"] == "ddp")
    for row in rows:
        if row is not ddp:
            yield row["policy"], "speed of ddp's", row["of_ddp"]
            for name in ("peak_mib", "cpu_ms"):
                if name in row:
                    yield row["policy"], name, ddp[name]["median"] / row[name]["median"]


def _shaping(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    for row in rows:
        yield f"{row['rate']}, MTU {row['mtu']}", "share", row["share"]["median"]


def _classifier(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    for row in rows:
        if "of_without" in row:
            yield "throughput", "of without", row["of_without"]["median"]


_RATIOS: dict[str, Callable[[list[Row]], Iterator[tuple[str, str, float]]]] = {
    "step": _step,
    "contention": _contention,
    "two-jobs": _two_jobs,
    "rate-change": _rate_change,
    "scale": _scale,
    "congestion": _congestion,
    "real": _real,
    "overhead": _overhead,
    "shaping": _shaping,
    "classifier": _classifier,
}
