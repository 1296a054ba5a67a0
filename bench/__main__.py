"""`python -m bench`: the benchmarks' command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import attach, bucket, classifier, host, overhead, record, shaping, simulator, throughput
from bench import step as step_bench
from tlsched.config import parse_rate
from tlsched.shapes.names import SHAPE_NAMES

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
STEP_POLICIES = "ddp,fifo,lanes,kernel"
RESULTS = Path(__file__).parent / "results"

Rounds = Annotated[int, typer.Option(min=1, help="How often everything is measured, in turn.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]


@app.command("classifier")
def classifier_command(rounds: Rounds = 9, json_file: Json = None) -> None:
    """Nanoseconds a packet that the classifier costs, and what an unshaped link carries with it."""
    rows = classifier.measure(rounds)
    _show("classifier, ns a packet", ("packet", "trust", "band"), "ns", rows, "{:.0f}")
    without, with_it = throughput.measure(rounds)
    _show("iperf3 over a veth, Gbit/s", ("classifier",), "gbit_s", [without, with_it], "{:.2f}")
    pairs = [with_it | {"classifier": "with / without"}]
    _show("the same, pair by pair", ("classifier",), "of_without", pairs, "{:.3f}")
    record.save(json_file, "classifier", [*rows, without, with_it])


@app.command("host")
def host_command(rounds: Rounds = 5, json_file: Json = None) -> None:
    """Seconds that attach, status and detach take as commands."""
    rows = host.measure(rounds)
    _show("commands, seconds", ("command",), "seconds", rows, "{:.2f}")
    record.save(json_file, "host", rows)


@app.command("attach")
def attach_command(rounds: Rounds = 10, json_file: Json = None) -> None:
    """Milliseconds for which a busy link stands still while it is attached or detached."""
    rows = attach.measure(rounds)
    _show("attach, longest stop in ms", ("command",), "ms", rows, "{:.1f}")
    record.save(json_file, "attach", rows)


@app.command("shaping")
def shaping_command(rounds: Rounds = 5, json_file: Json = None) -> None:
    """Share of its rate that an attached link reaches, at 100 Mbit/s, 1 and 10 Gbit/s."""
    rows = shaping.measure(rounds)
    _show("shaping, share of the rate", ("rate", "mtu"), "share", rows, "{:.3f}")
    record.save(json_file, "shaping", rows)


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
    with _progress(len(settings) * len(names) * rounds) as step:
        for setting in settings:
            more, lab = step_bench.measure(setting, names, rounds, step)
            rows += more
    shown = [row | _bounds(row) for row in rows]
    columns = ("model", "ratio", "policy", "floor", "oracle", "simulated", "of oracle")
    _show("step, seconds an iteration", columns, "iteration_s", shown, "{:.3f}")
    record.save(json_file, "step", rows, lab=lab)


@app.command("overhead")
def overhead_command(rounds: Rounds = 3, json_file: Json = None) -> None:
    """Speed and memory beside DDP where communication is a tenth of the compute."""
    with _progress(2 * rounds + 2) as step:
        rows = overhead.measure(rounds, step)
    _show("overhead, s/iteration", ("policy", "of_ddp"), "iteration_s", rows, "{:.4f}")
    _show("overhead, peak MiB", ("policy",), "peak_mib", rows, "{:.0f}")
    record.save(json_file, "overhead", rows)


@app.command("bucket")
def bucket_command(rounds: Rounds = 5, json_file: Json = None) -> None:
    """Microseconds of Python that a bucket costs a step."""
    rows = bucket.measure(rounds)
    _show("bucket, microseconds", ("what",), "microseconds", rows, "{:.0f}")
    record.save(json_file, "bucket", rows)


@app.command("simulator")
def simulator_command(rounds: Rounds = 3, json_file: Json = None) -> None:
    """Seconds for one simulated iteration, and for a plan: 64 hosts, 200 buckets; 1,024 and 400."""
    rows = simulator.measure(rounds)
    _show("simulator, seconds", ("hosts", "buckets", "what"), "seconds", rows, "{:.3f}")
    record.save(json_file, "simulator", rows)


@app.command("all")
def all_command(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
) -> None:
    """Everything, with the results as JSON: about eight minutes."""
    classifier_command(json_file=out / "classifier.json")
    host_command(json_file=out / "host.json")
    attach_command(json_file=out / "attach.json")
    shaping_command(json_file=out / "shaping.json")
    bucket_command(json_file=out / "bucket.json")
    simulator_command(json_file=out / "simulator.json")
    overhead_command(json_file=out / "overhead.json")
    step_command(json_file=out / "step.json")


def _bounds(row: dict[str, Any]) -> dict[str, str]:
    """What a row of `step` is held against, to be shown."""
    found = {name: row[f"{name}_s"] for name in ("floor", "oracle", "simulated")}
    shown = {name: "" if value is None else f"{value:.3f}" for name, value in found.items()}
    return shown | {"of oracle": f"{row['oracle_s'] / row['iteration_s']['median']:.3f}"}


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of ``total`` steps, and what to call with a line before each of them."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda what: progress.update(task, advance=1, description=what)


def _show(
    title: str, names: tuple[str, ...], figure: str, rows: list[dict[str, Any]], form: str
) -> None:
    table = Table(title=title, title_justify="left")
    for name in (*names, "median", "min", "max", "n"):
        table.add_column(name, justify="left" if name in names else "right")
    for row in rows:
        spread = row[figure]
        figures = [form.format(spread[key]) for key in ("median", "min", "max")]
        table.add_row(*(str(row[name]) for name in names), *figures, str(spread["n"]))
    console.print(table)


if __name__ == "__main__":
    app()
