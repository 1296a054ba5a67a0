"""What the benchmarks' commands share: options, progress bars, tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
RESULTS = Path(__file__).parent / "results"

Rounds = Annotated[int, typer.Option(min=1, help="How often everything is measured, in turn.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds, iterations and cases.")]


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of ``total`` steps, and what to call with a line before each of them."""
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def show(
    title: str,
    names: Sequence[str],
    figure: str,
    rows: list[dict[str, Any]],
    form: str,
    keys: Sequence[str] = ("median", "min", "max", "n"),
) -> None:
    """Print the spread ``figure`` of ``rows``, in columns ``keys`` behind those of ``names``."""
    table = Table(title=title, title_justify="left")
    for name in (*names, *keys):
        table.add_column(name, justify="left" if name in names else "right")
    for row in rows:
        spread = row[figure]
        figures = [str(spread[key]) if key == "n" else form.format(spread[key]) for key in keys]
        table.add_row(*(_cell(row[name]) for name in names), *figures)
    console.print(table)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
