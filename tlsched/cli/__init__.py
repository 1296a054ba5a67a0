"""The command line: the only package that prints or exits.

Exit codes: 0 done, or already so; 1 a change failed and was undone, or `doctor` found what
prevents attach; 2 bad input, missing permission or missing feature (nothing changed); 3 `status`:
not attached; 4 `status`: drifted; 5 what was asked for is done, but its output could not be
written (a full disk, said in one line; a reader that has closed the pipe, not said). `lab exec`
and `run` end with their command's own code, 127 where there is no such command and 126 where it
may not be run.
"""

from __future__ import annotations

import atexit
import gc
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tlsched import __version__, descriptors
from tlsched.errors import TlschedError

EXIT_UNWRITTEN = 5
OPEN_FILES = 8  # what every command may need at once; with fewer the reasons given would be wrong
_ENDING = (signal.SIGTERM, signal.SIGHUP)

app = typer.Typer(
    name="tlsched",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",  # lets help text flow to the terminal's width
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tlsched {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Let the kernel send first the bytes that the next forward pass needs first."""


def _end(number: int, _frame: object) -> None:
    # Once is enough: a terminal that closes sends SIGHUP twice, the kernel's and the shell's, and
    # the second would interrupt the undoing.
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _print_error(text: str) -> None:
    from tlsched.cli.output import one_line

    line = Text.assemble(("error:", "red"), f" {one_line(text)}")  # brackets are no markup
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def main() -> None:
    """Entry point of the `tlsched` command."""
    from tlsched.cli import (
        demo,
        doctor,
        host,
        lab,
        mark,
        metrics,
        plan,
        server,
        simulate,
        top,
        unit,
    )
    from tlsched.cli.output import OutputLost, discard, watch

    watch()
    for module in (host, mark, unit, doctor, top, metrics, plan, simulate, server, lab, demo):
        module.register(app)
    # At its end the interpreter searches all that was imported for garbage: 0.1 s of the 0.5 s that
    # `detach` takes, measured. Frozen objects are not searched.
    atexit.register(gc.freeze)
    # As Ctrl-C does, so that whoever holds a lab or a half-made change still cleans up.
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup's wish is not ours to overrule
            signal.signal(number, _end)
    try:
        descriptors.fill_standard()
        descriptors.require(OPEN_FILES)
        app()
    except TlschedError as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in descriptors.EXHAUSTED:
            raise
        said = descriptors.too_few(error)
        _print_error(str(said))
        sys.exit(said.exit_code)
    except OutputLost as lost:
        discard()
        if not lost.closed:
            _print_error(f"cannot write the output ({lost})")
        sys.exit(EXIT_UNWRITTEN)
