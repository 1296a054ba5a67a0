"""The command line: the only package that prints or exits.

Exit codes: 0 done, or already so; 1 a change failed and was undone; 2 bad input, missing
permission or missing feature (nothing changed); 3 `status`: not attached; 4 `status`: drifted.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from tlsched.errors import TlschedError

app = typer.Typer(
    name="tlsched",
    help="Let the kernel send first the bytes that the next forward pass needs first.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `tlsched` command."""
    from tlsched.cli import demo, host, lab

    for module in (host, lab, demo):
        module.register(app)
    try:
        app()
    except TlschedError as error:
        Console(stderr=True, highlight=False).print(
            f"[red]error:[/red] {error}", soft_wrap=True, markup=True
        )
        sys.exit(error.exit_code)
