"""`tlsched demo`: DDP and tlsched side by side on an emulated cluster."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tlsched.errors import ConfigError, FeatureMissing


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("out"),
    rounds: Annotated[
        int, typer.Option(min=1, max=20, help="How often the replayed policies take turns.")
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print demo.json's content.")] = False,
) -> None:
    """Train over an emulated cluster with DistributedDataParallel and with tlsched, and compare.

    Builds four hosts as network namespaces with 1 Gbit/s links (root is needed), trains a small
    network on digits, then replays VGG-16's layer sizes at a tenth with the compute slept. Takes
    about three minutes and leaves nothing behind but OUT/demo.json and OUT/demo.png.
    """
    missing = [name for name in ("torch", "sklearn", "matplotlib") if find_spec(name) is None]
    if missing:
        raise FeatureMissing(
            f"the demonstration needs {', '.join(missing)}", hint="pip install 'tlsched[demo]'"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be made ({error.strerror})", hint="name another folder with --out"
        ) from None
    from tlsched.demo import report, run

    console = Console(stderr=as_json)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting the cluster", total=run.steps(rounds))

        def step(what: str) -> None:
            progress.update(task, advance=1, description=what)
            if not console.is_terminal:
                console.print(what)

        outcome = run.run_demo(rounds, step)
    rows = report.rows(outcome)
    report.save(outcome, rows, out)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    for table in _tables(rows, outcome.floor_s):
        console.print(table)
    console.print(f"written: {out / 'demo.json'}, {out / 'demo.png'}", highlight=False)


def _tables(rows: list[dict[str, object]], floor_s: float) -> list[Table]:
    real = Table(title="real training: digits", title_justify="left")
    for name in ("policy", "loss", "accuracy", "s/iteration"):
        real.add_column(name, justify="left" if name == "policy" else "right")
    replay = Table(
        title=f"replayed VGG-16 (floor {floor_s:.3f} s)",
        title_justify="left",
    )
    for name in ("policy", "s/iteration", "x DDP", "floor / s"):
        replay.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        seconds = f"{row['iteration_s']:.3f}"
        if row["part"] == "real":
            real.add_row(
                str(row["policy"]), f"{row['loss']:.6f}", f"{row['accuracy']:.3f}", seconds
            )
        else:
            replay.add_row(
                str(row["policy"]), seconds, f"{row['speedup']:.2f}", f"{row['of_floor']:.2f}"
            )
    return [real, replay]
