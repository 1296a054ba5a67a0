"""`python -m bench`: what trains over a lab."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bench import overhead, record
from bench import step as step_bench
from bench.shown import Json, Quick, Rounds, progress, show
from tlsched.config import parse_rate
from tlsched.shapes.names import SHAPE_NAMES

app = typer.Typer()
STEP_POLICIES = "ddp,fifo,lanes,kernel"


@app.command("step")
def step_command(
    model: Annotated[str, typer.Option(help="Comma-separated shapes, or all.")] = "vgg16",
    ratio: Annotated[str, typer.Option(help="Communication over computation, a list.")] = "1",
    hosts: Annotated[int, typer.Option(min=2, max=16)] = 4,
    rate: Annotated[str, typer.Option(help="Of every link.")] = "1gbit",
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = STEP_POLICIES,
    backend: Annotated[str, typer.Option(help="Only allreduce so far.")] = "allreduce",
    rounds: Rounds = 3,
    json_file: Json = None,
) -> None:
    """Seconds an iteration of replayed shapes under each policy, and what was expected."""
    if backend != "allreduce":
        raise typer.BadParameter("only allreduce so far")
    names = policies.split(",")
    models = SHAPE_NAMES if model == "all" else tuple(model.split(","))
    settings = [
        step_bench.Setting(shape, float(part), hosts, parse_rate(rate))
        for shape in models
        for part in ratio.split(",")
    ]
    rows: list[dict[str, Any]] = []
    lab: dict[str, Any] = {}
    with progress(len(settings) * (len(names) * rounds + 2)) as step:
        for setting in settings:
            more, lab = step_bench.measure(setting, names, rounds, step)
            rows += more
    shown = [row | _bounds(row) for row in rows]
    columns = ("model", "ratio", "policy", "floor", "oracle", "simulated", "of oracle")
    show("step, seconds an iteration", columns, "iteration_s", shown, "{:.3f}")
    record.save(json_file, "step", rows, lab=lab)


@app.command("overhead")
def overhead_command(rounds: Rounds = 3, quick: Quick = False, json_file: Json = None) -> None:
    """Speed and memory beside DDP where communication is a tenth of the compute."""
    with progress(2 * rounds + 2) as step:
        rows = overhead.measure(1 if quick else rounds, step)
    show("overhead, s/iteration", ("policy", "of_ddp"), "iteration_s", rows, "{:.4f}")
    show("overhead, peak MiB", ("policy",), "peak_mib", rows, "{:.0f}")
    record.save(json_file, "overhead", rows)


def _bounds(row: dict[str, Any]) -> dict[str, str]:
    """What a row of `step` is held against, to be shown."""
    found = {name: row[f"{name}_s"] for name in ("floor", "oracle", "simulated")}
    shown = {name: "" if value is None else f"{value:.3f}" for name, value in found.items()}
    return shown | {"of oracle": f"{row['oracle_s'] / row['iteration_s']['median']:.3f}"}
