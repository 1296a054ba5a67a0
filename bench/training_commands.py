"""`python -m bench`: what trains over a lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bench import overhead, real, record, scale
from bench import step as step_bench
from bench.shown import Json, Quick, Rounds, progress, show
from bench.step import Setting
from tlsched.config import parse_rate
from tlsched.shapes.names import SHAPE_NAMES

app = typer.Typer()
STEP_POLICIES = "ddp,fifo,lanes,kernel"
SERVER_POLICIES = "sync,lanes,kernel"
MAIN_POLICIES = ["ddp", "ddp-best", "kernel"]
EVERY_POLICY = [*MAIN_POLICIES, "fsdp2", "fifo", "lanes", "bytescheduler", "prophet"]
OTHER_RATIOS = (0.5, 1.5, 3.0)


@app.command("step")
def step_command(
    model: Annotated[str, typer.Option(help="Comma-separated shapes, or all.")] = "vgg16",
    ratio: Annotated[str, typer.Option(help="Communication over computation, a list.")] = "1",
    hosts: Annotated[int, typer.Option(min=2, max=16)] = 4,
    rate: Annotated[str, typer.Option(help="Of every link.")] = "1gbit",
    policies: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    backend: Annotated[str, typer.Option(help="allreduce (a ring), or ps.")] = "allreduce",
    servers: Annotated[
        int, typer.Option(min=0, max=16, help="Of ps, on hosts of their own; 0: one a worker.")
    ] = 0,
    rounds: Rounds = 3,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Seconds an iteration of replayed shapes under each policy, and what was expected."""
    if backend not in ("allreduce", "ps"):
        raise typer.BadParameter("allreduce or ps")
    names = policies or (STEP_POLICIES if backend == "allreduce" else SERVER_POLICIES)
    if backend == "ps" and set(names.split(",")) & {"ddp", "ddp-best", "fsdp2"}:
        raise typer.BadParameter("torch's own know no parameter servers; sync is the classical one")
    models = SHAPE_NAMES if model == "all" else tuple(model.split(","))
    settings = [
        Setting(
            shape,
            float(part),
            hosts,
            parse_rate(rate),
            backend=cast("Any", backend),
            servers=servers,
        )
        for shape in models
        for part in ratio.split(",")
    ]
    _steps([(setting, names.split(",")) for setting in settings], rounds, quick, json_file)


def every_step(*, quick: bool, json_file: Path) -> None:
    """All shapes at ratio 1, all policies on one of them, and that one at other ratios."""
    first, *others = SHAPE_NAMES
    at_1 = [(Setting(first, 1.0, 4, 10**9), EVERY_POLICY)]
    if not quick:
        at_1 += [(Setting(shape, 1.0, 4, 10**9), MAIN_POLICIES) for shape in others]
        at_1 += [(Setting(first, ratio, 4, 10**9), MAIN_POLICIES) for ratio in OTHER_RATIOS]
    _steps(at_1, 2, quick, json_file)


def _steps(
    wanted: list[tuple[Setting, list[str]]], rounds: int, quick: bool, json_file: Path | None
) -> None:
    rows: list[dict[str, Any]] = []
    lab: dict[str, Any] = {}
    rounds, iterations = (1, 5) if quick else (rounds, step_bench.ITERATIONS)
    with progress(sum(1 + len(names) * (rounds + 1) for _, names in wanted)) as step:
        for setting, names in wanted:
            more, lab = step_bench.measure(
                setting, names, rounds, step, iterations=iterations, quick=quick
            )
            rows += more
    shown = [row | _bounds(row) for row in rows]
    columns = ("model", "ratio", "policy", "floor", "oracle", "simulated", "of oracle")
    show("step, seconds an iteration", columns, "iteration_s", shown, "{:.3f}")
    record.save(json_file, "step", rows, lab=lab)


@app.command("overhead")
def overhead_command(rounds: Rounds = 3, quick: Quick = False, json_file: Json = None) -> None:
    """Speed, processor time, start-up and memory where communication is a tenth of the compute."""
    rounds, iterations = (1, 5) if quick else (rounds, overhead.ITERATIONS)
    with progress(2 * rounds + 2) as step:
        rows, lab = overhead.measure(rounds, step, iterations=iterations)
    show("overhead, s/iteration", ("policy", "of_ddp"), "iteration_s", rows, "{:.4f}")
    show("overhead, CPU ms an iteration and rank", ("policy",), "cpu_ms", rows, "{:.1f}")
    show("overhead, start-up in seconds", ("policy",), "startup_s", rows, "{:.2f}")
    show("overhead, peak MiB", ("policy",), "peak_mib", rows, "{:.0f}")
    record.save(json_file, "overhead", rows, lab=lab)


@app.command("scale")
def scale_command(rounds: Rounds = 2, quick: Quick = False, json_file: Json = None) -> None:
    """2, 4 and 8 hosts measured, 16 to 1,024 simulated."""
    hosts, rounds, iterations = (
        (scale.MEASURED[:1], 1, 4) if quick else (scale.MEASURED, rounds, scale.ITERATIONS)
    )
    with progress(len(hosts) * (1 + len(scale.POLICIES) * (rounds + 1))) as step:
        rows, lab = scale.measure(hosts, rounds, step, iterations=iterations)
    columns = ("hosts", "policy", "simulated_s", "floor_s")
    measured = [row for row in rows if row["iteration_s"]]
    show("scale, seconds an iteration", columns, "iteration_s", measured, "{:.3f}")
    record.save(json_file, "scale", rows, lab=lab)


@app.command("real")
def real_command(rounds: Rounds = 3, quick: Quick = False, json_file: Json = None) -> None:
    """Real models to a given loss: a CNN on digits, a transformer on Python's own sources."""
    names = list(real.MODELS)[:1] if quick else list(real.MODELS)
    rounds = 1 if quick else rounds
    with progress(len(names) * len(real.POLICIES) * rounds) as step:
        rows, lab = real.measure(names, rounds, step)
    columns = ("model", "policy", "target", "iterations", "over_ddp")
    show("real, seconds to the loss", columns, "to_loss_s", rows, "{:.2f}")
    record.save(json_file, "real", rows, lab=lab)


def _bounds(row: dict[str, Any]) -> dict[str, str]:
    """What a row of `step` is held against, to be shown."""
    found = {name: row[f"{name}_s"] for name in ("floor", "oracle", "simulated")}
    shown = {name: "" if value is None else f"{value:.3f}" for name, value in found.items()}
    return shown | {"of oracle": f"{row['oracle_s'] / row['iteration_s']['median']:.3f}"}
