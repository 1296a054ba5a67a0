"""top: the bands' traffic and the lanes' sockets, live."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlsched.config import format_rate
from tlsched.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from tlsched.livetraffic import LinkTraffic, Traffic
    from tlsched.sockdiag import LaneSocket

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
PIPE_COLUMNS = 160  # room for a row with two IPv6 addresses


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(top)


def top(
    iface: Annotated[
        str | None,
        typer.Option("--iface", "-i", help="One interface; all that are attached without it."),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds from one refresh to the next.")] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", "-n", help="Stop after this many refreshes.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="The same as --count 1.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON a refresh.")
    ] = False,
) -> None:
    """Show the bands' rates, backlogs and drops, and each lane's sockets, until Ctrl-C.

    Rates are those on the wire, headers included, over the last interval. A socket is listed
    when it carries both marks of a lane; *unsent* has not left the socket, *unacked* waits in
    the band, on the wire or for its acknowledgement. Only sockets of this network namespace are
    seen, most unsent bytes first.

    Into a pipe or a file each refresh is printed below the one before.

    Examples:

      tlsched top

      tlsched top --iface eth0 --interval 0.5

      tlsched top --once

      tlsched top --json --count 60 > minute.jsonl

    Exit codes: 0 ended by --count, --once or Ctrl-C; 2 bad input, missing permission, or the
    interface is gone.
    """
    if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
        raise ConfigError(
            f"an interval of {interval} s is out of range",
            hint=f"use {MIN_INTERVAL_S} to {MAX_INTERVAL_S:g} seconds",
        )
    if count is not None and count < 1:
        raise ConfigError(f"--count {count} shows nothing", hint="give 1 or more")
    try:
        _show(_refreshes(iface, interval, 1 if once else count), as_json)
    except KeyboardInterrupt:
        return  # the way to end it


def _refreshes(iface: str | None, interval_s: float, count: int | None) -> Iterator[Traffic]:
    from tlsched import livetraffic

    before = livetraffic.read(iface)
    for _ in itertools.count() if count is None else range(count):
        time.sleep(interval_s)
        after = livetraffic.read(iface)
        yield livetraffic.between(before, after)
        before = after


def _show(refreshes: Iterator[Traffic], as_json: bool) -> None:
    if as_json:
        for traffic in refreshes:
            typer.echo(json.dumps(traffic.as_dict()))
            sys.stdout.flush()
        return
    from rich.console import Console
    from rich.live import Live

    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # "[fd00::1]:80"
    console = Console(**plain)
    if not console.is_terminal:
        console = Console(**plain, width=PIPE_COLUMNS)
        for traffic in refreshes:
            console.print(_screen(traffic))
        return
    last = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for traffic in refreshes:
            last = _screen(traffic)
            live.update(last, refresh=True)
    if last is not None:
        console.print(last)  # the alternate screen is gone, and what it showed with it


def _screen(traffic: Traffic) -> Group:
    from rich.console import Group

    parts: list[Table | str] = []
    for link in traffic.links:
        shaped = "" if link.rate_bps is None else f", {format_rate(link.rate_bps)}"
        refused = f", {link.refused_per_s:.0f} packets/s refused" if link.refused_per_s else ""
        parts += [f"{link.iface}: {link.state}{shaped}{refused}", _bands(link), ""]
    if not traffic.links:
        parts += ["no interface is attached", ""]
    if traffic.sockets is None:
        parts.append("the kernel cannot list sockets (CONFIG_INET_DIAG)")
    elif not traffic.sockets:
        parts.append("no socket carries a lane's marks")
    else:
        parts.append(_sockets(traffic.sockets))
    return Group(*parts)


def _bands(link: LinkTraffic) -> Table:
    from rich.filesize import decimal

    rows = [
        (
            band.name,
            _rate(band.rate_bps),
            f"{band.packets_per_s:.0f}",
            decimal(band.backlog_bytes),
            f"{band.drops_per_s:.0f}",
            str(band.drops),
        )
        for band in link.bands
    ]
    return _table(("band", "rate", "packets/s", "backlog", "drops/s", "drops"), rows)


def _sockets(sockets: tuple[LaneSocket, ...]) -> Table:
    from rich.filesize import decimal

    rows = [
        (s.lane, decimal(s.unsent_bytes), decimal(s.unacked_bytes), s.local, s.peer)
        for s in sockets
    ]
    return _table(("lane", "unsent", "unacked", "local", "peer"), rows)


def _table(titles: tuple[str, ...], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _rate(rate_bps: float) -> str:
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate_bps >= factor:
            return f"{rate_bps / factor:.4g} {unit}"
    return f"{rate_bps:.0f} bit/s"
