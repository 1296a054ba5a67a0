"""`python -m bench report` and `compare`: what becomes of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bench import compare, report
from bench.shown import console
from tlsched.errors import ConfigError

app = typer.Typer()


@app.command("report")
def report_command(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if stale.")
    ] = False,
) -> None:
    """Write the results into README.md, docs/benchmarks.md and docs/images."""
    place = report.Place(Path(__file__).parent.parent)
    changed = report.stale(place) if check else report.write(place)
    for path in changed:
        console.print(f"{'stale' if check else 'written'}: {path.relative_to(place.root)}")
    raise typer.Exit(int(check and bool(changed)))


@app.command("compare")
def compare_command(
    old: Annotated[Path, typer.Argument(help="A result, or a folder of results.")],
    new: Annotated[Path, typer.Argument(help="The same, of another run.")],
) -> None:
    """Compare two runs' ratios; exit 1 when one fell by more than 5 %."""
    try:
        found = compare.compare(old, new)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    table = Table(title="ratios, the higher the better", title_justify="left")
    for name in ("bench", "case", "ratio", "old", "new", "change"):
        table.add_column(name, justify="right" if name in ("old", "new", "change") else "left")
    for one in sorted(found.changes, key=lambda change: change.change):
        shown = f"{one.change:+.1%}{' fell' if one.fell else ''}"
        figures = f"{one.old.value:.3f}", f"{one.new.value:.3f}", shown
        style = "red" if one.fell else None
        table.add_row(one.old.bench, one.old.case, one.old.what, *figures, style=style)
    console.print(table)
    for which, cases in (("old", found.only_old), ("new", found.only_new)):
        if cases:
            console.print(f"only in {which}: {'; '.join(cases)}")
    raise typer.Exit(int(found.fell))
