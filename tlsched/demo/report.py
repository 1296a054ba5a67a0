"""What the demonstration leaves: rows for machines, a picture for people."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from tlsched.demo.run import Measured, Outcome

COLOURS = {"sending": "#3b78b5", "needed": "#c03b2b"}
TITLES = {"ddp": "DistributedDataParallel", "kernel": "tlsched, policy kernel"}


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """One dict a part and policy: median seconds an iteration and what it means."""
    ddp = median(next(m for m in outcome.measured if _is(m, "replay", "ddp")).iteration_s)
    result = []
    for one in outcome.measured:
        seconds = median(one.iteration_s)
        row: dict[str, Any] = {
            "part": one.part,
            "policy": one.policy,
            "iteration_s": seconds,
            "iteration_min_s": min(one.iteration_s),
            "iteration_max_s": max(one.iteration_s),
            "iterations": len(one.iteration_s),
            "loss": one.loss,
        }
        if one.accuracy is not None:
            row["accuracy"] = one.accuracy
        if one.part == "replay":
            row |= {"speedup": ddp / seconds, "of_floor": outcome.floor_s / seconds}
        result.append(row)
    return result


def save(outcome: Outcome, table: list[dict[str, Any]], folder: Path) -> None:
    """Write demo.json and demo.png into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.json").write_text(json.dumps(table, indent=2) + "\n")
    _draw(outcome, folder / "demo.png")


def _is(one: Measured, part: str, policy: str) -> bool:
    return (one.part, one.policy) == (part, policy)


def _draw(outcome: Outcome, path: Path) -> None:
    """A row a bucket: blue from ready to the end of sending, red where forward needs it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(outcome.timelines), 1, sharex=True, figsize=(10, 7), layout="constrained"
    )
    for axis, (policy, timeline) in zip(axes, outcome.timelines.items(), strict=True):
        for number, bucket in enumerate(timeline):
            left, width = bucket["ready_s"], bucket["sent_s"] - bucket["ready_s"]
            axis.barh(number, width, left=left, color=COLOURS["sending"], height=0.7)
            axis.plot(
                [bucket["needed_s"]] * 2, [number - 0.45, number + 0.45], color=COLOURS["needed"]
            )
            axis.annotate(
                f"{bucket['bytes'] / 1e6:.1f} MB",
                (max(left + width, bucket["needed_s"]), number),
                textcoords="offset points",
                xytext=(4, -3),
                fontsize=7,
            )
        axis.set_title(TITLES[policy], loc="left")
        axis.yaxis.get_major_locator().set_params(integer=True)
        axis.set_ylabel("bucket, first needed on top")
        axis.invert_yaxis()
    axes[-1].set_xlim(0, 1.06 * axes[-1].get_xlim()[1])  # room for the last label
    axes[-1].set_xlabel("seconds after the step() that began the iteration")
    figure.suptitle(
        "Blue: from a bucket's last gradient to its average. Red: the next forward asks for it.",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
