"""metrics: the bands' counters for a monitoring system."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tlsched.errors import ConfigError, HostError


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(metrics)


def metrics(
    iface: Annotated[
        str | None,
        typer.Option("--iface", "-i", help="One interface; all that are attached without it."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write this file, in one step; else print."),
    ] = None,
) -> None:
    """Print the bands' counters and the links' state as OpenMetrics.

    Meant for the textfile collector of node_exporter: run it from a timer, every 15 seconds
    say. --output replaces the file in one step, so the collector never reads half of one. A
    link that is not attached any more is in it no more; absent() alerts then.

    Examples:

      tlsched metrics

      tlsched metrics --output /var/lib/node_exporter/textfile_collector/tlsched.prom

    Exit codes: 0 printed or written, whatever state the links are in; 2 bad input, missing
    permission, or the file cannot be written: the old one stays.
    """
    from tlsched import linkstatus
    from tlsched.metrics import openmetrics

    text = openmetrics(linkstatus.status(iface))
    if output is None:
        typer.echo(text, nl=False)
    else:
        _replace(output, text)


def _replace(path: Path, text: str) -> None:
    """Write ``path`` in one step: a file beside it, renamed over it (rename(2))."""
    # A symbolic link stays one. Unlike Path's own methods these raise nothing (EACCES, ELOOP).
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and not os.path.isfile(path):  # as root, /dev/null would be replaced
        raise ConfigError(f"{path} is not a regular file", hint="without --output it is printed")
    beside = None
    try:
        # The collector reads what ends in .prom, and as a user of its own.
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", suffix=".new", delete=False
        ) as file:
            beside = Path(file.name)
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        beside.replace(path)
    except OSError as error:
        raise HostError(
            f"cannot write {path}: {error.strerror}",
            hint="name a file in the folder of --collector.textfile.directory",
        ) from error
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)
