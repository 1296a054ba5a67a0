"""doctor: what prevents attach, and what would spoil it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tlsched.config import parse_rate

if TYPE_CHECKING:
    from tlsched.doctor import Finding

EXIT_BLOCKED = 1
_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "blocker": "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(doctor)


def doctor(
    iface: Annotated[
        str | None,
        typer.Option("--iface", "-i", help="One interface; all that look physical without it."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="The rate that attach is to be given, as there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list in JSON.")] = False,
) -> None:
    """Look for what prevents attach, and for what would spoil it.

    Prints one finding a line: how bad it is, whether it is about the host or an interface,
    what was found and what to do about it. A *blocker* has attach refused, a *warning* means that
    it works less well or not for long, a *note* is good to know.

    Changes nothing: what has to be tried is tried in a throw-away network namespace and as a dry
    run. Needs no privilege, but says what it could not look at.

    Examples:

      tlsched doctor

      tlsched doctor --iface eth0 --rate 10gbit

    Exit codes: 0 nothing prevents attach, 1 a blocker was found, 2 bad input.
    """
    from tlsched import doctor as doctors

    rate_bps = None if rate is None else parse_rate(rate)
    found = doctors.examine(iface, rate_bps)
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in found], indent=2))
    else:
        _print(found)
    if any(finding.level == "blocker" for finding in found):
        raise typer.Exit(EXIT_BLOCKED)


def _print(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)  # one line each, however long
    width = max(len(finding.about) for finding in found)
    for finding in found:
        level = (f"{finding.level:<7}", _STYLES[finding.level])
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        console.print(Text.assemble(level, f"  {finding.about:<{width}}  {finding.what}{remedy}"))
