"""attach, detach, status: the commands of the host's administrator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlsched.bands import DEFAULT_DSCPS
from tlsched.cli.output import one_line
from tlsched.config import DEFAULT_SHARE, format_rate
from tlsched.configfile import attach_options
from tlsched.errors import InterfaceMissing

if TYPE_CHECKING:
    from tlsched.control import LinkStatus, Outcome

EXIT_DETACHED, EXIT_DRIFTED = 3, 4

Iface = Annotated[str, typer.Option("--iface", "-i", help="Interface, as `ip link` names it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be changed, and stop.")]


def register(app: typer.Typer) -> None:
    """Add the three commands to ``app``."""
    app.command()(attach)
    app.command()(detach)
    app.command()(status)


def attach(
    iface: Iface,
    config: Annotated[
        Path | None,
        typer.Option(help="A file with a section for the interface; flags override it."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help='Shape to this rate: "1gbit", "2.5gbit", or bit/s. As fast as the device without.'
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help="Part of the link that all other traffic always gets; 0 (without a rate): none.",
            show_default=str(DEFAULT_SHARE),
        ),
    ] = None,
    qdisc: Annotated[
        str | None,
        typer.Option(
            help="The tree's root: htb (needs a rate or a device that tells its speed), ets,"
            " prio (guarantees nothing to other traffic), mqprio (the card orders), or auto.",
            show_default="auto",
        ),
    ] = None,
    classifier: Annotated[
        str | None,
        typer.Option(
            help="What tells packets apart: bpf, u32 (filters on the DSCP alone), or auto: u32 only"
            " where BPF cannot be used.",
            show_default="auto",
        ),
    ] = None,
    dscps: Annotated[
        str | None,
        typer.Option(
            help="The lanes' code points, most urgent first; training needs the same.",
            show_default=",".join(map(str, DEFAULT_DSCPS)),
        ),
    ] = None,
    trust_cgroup: Annotated[
        list[str] | None,
        typer.Option(help="Only sockets made in this cgroup (v2) or below it; repeatable."),
    ] = None,
    trust_uid: Annotated[
        list[str] | None, typer.Option(help="Only sockets of this user, name or uid; repeatable.")
    ] = None,
    trust_source: Annotated[
        list[str] | None,
        typer.Option(help="Also packets forwarded from this prefix, v4 or v6; repeatable."),
    ] = None,
    replace_root: Annotated[
        bool | None,
        typer.Option("--replace-root", help="Replace a root qdisc that somebody configured."),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Let the kernel serve the lanes of an interface in strict order.

    Puts a qdisc tree at the interface's root and a classifier before it. Nothing stays
    running. Attaching again with other settings changes them in place; with the same ones it
    does nothing. A failure half-way is undone.

    Without --trust-cgroup and --trust-uid every socket of this host may use the lanes, with
    them those that either names. Others' packets lose the lanes' DSCPs.

    Examples:

      tlsched attach --iface eth0 --rate 10gbit --dry-run

      tlsched attach --iface eth0 --rate 10gbit

      tlsched attach --iface eth0 --rate 9.5gbit --share 0.1

      tlsched attach --iface eth0

      tlsched attach --iface eth0 --rate 10gbit --trust-cgroup /training.slice

      tlsched attach --iface eth0 --config /etc/tlsched/tlsched.toml

    Exit codes: 0 attached (or already so), 1 a change failed and was undone, 2 bad input,
    missing permission or missing feature: nothing was changed.
    """
    from tlsched import control

    flags: dict[str, Any] = {
        "rate": rate,
        "share": share,
        "qdisc": qdisc,
        "classifier": classifier,
        "dscps": dscps,
        "replace_root": replace_root,
    }
    lists = {"cgroups": trust_cgroup, "uids": trust_uid, "sources": trust_source}
    flags |= {f"trust.{key}": value or None for key, value in lists.items()}
    wanted = attach_options(iface, config, flags)
    outcome = control.attach(wanted.settings, dry_run=dry_run, replace_root=wanted.replace_root)
    _print_outcome(outcome, as_json)


def detach(
    iface: Iface,
    missing_ok: Annotated[
        bool, typer.Option("--missing-ok", help="An interface that is gone is no error.")
    ] = False,
    if_drifted: Annotated[
        bool,
        typer.Option("--if-drifted", help="Only if it is not as attach left it; fails then."),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove what attach put on an interface, and nothing else.

    The kernel's default qdisc returns. Where nothing is attached there is nothing to do.

    With --if-drifted it looks first, as status does: a link that is attached stays so, and one that
    somebody changed is shown and detached (tlsched@.service does this right after attach).

    Example:

      tlsched detach --iface eth0

    Exit codes: as of attach; with --if-drifted as of status.
    """
    from tlsched import control

    links: list[LinkStatus] = []
    try:
        links = control.status(iface) if if_drifted else []
        if links and not as_json:
            _print_links(links)
        if {link.state for link in links} == {"attached"}:
            if as_json:
                _print_outcome(control.Outcome(iface, "unchanged", (), dry_run), as_json)
            return
        outcome = control.detach(iface, dry_run=dry_run)
    except InterfaceMissing:  # whatever was on it went with it
        if not missing_ok:
            raise
        outcome = control.Outcome(iface, "unchanged", (), dry_run)
    if outcome.result == "unchanged" and not as_json:
        typer.echo(f"{iface}: not attached, nothing to do")
    else:
        _print_outcome(outcome, as_json)
    if links:
        _exit_by(links)


def status(
    iface: Annotated[
        str | None,
        typer.Option("--iface", "-i", help="One interface; all that are attached without it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is attached, whether it still is as it was set up, and the bands' counters.

    Everything is read from the kernel. --json prints a list with one object for each
    interface, also when --iface names one.

    Examples:

      tlsched status

      tlsched status --iface eth0 --json

    Exit codes: 0 attached, 2 bad input, 3 not attached, 4 drifted: somebody changed it (attach
    again to mend it).
    """
    from tlsched import control

    links = control.status(iface)
    if as_json:
        _print_json([link.as_dict() for link in links])
    else:
        _print_links(links)
    _exit_by(links)


def _exit_by(links: list[LinkStatus]) -> None:
    states = {link.state for link in links}
    if "drifted" in states:
        raise typer.Exit(EXIT_DRIFTED)
    if "attached" not in states:
        raise typer.Exit(EXIT_DETACHED)


def _print_outcome(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        _print_json(outcome.as_dict())
        return
    for line in outcome.changes:
        typer.echo(f"{outcome.iface}: {one_line(line)}")
    for note in outcome.notes:
        typer.echo(f"{outcome.iface}: note: {note}")
    would = " (dry run: nothing was changed)" if outcome.dry_run and outcome.changes else ""
    typer.echo(f"{outcome.iface}: {outcome.result}{would}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_links(links: list[LinkStatus]) -> None:
    if not links:
        typer.echo("no interface is attached")
    for link in links:
        rate = "" if link.rate_bps is None else f", {format_rate(link.rate_bps)}"
        if link.default_share is not None:
            rate += f", default share {link.default_share:.3g}"
        classifier = link.classifier or "no classifier"
        typer.echo(f"{link.iface}: {link.state}{rate} (qdisc {link.qdisc}, {classifier})")
        for note in link.notes:
            typer.echo(f"  note: {note}")
        for line in link.drift:
            typer.echo(f"  drift: {line}")
        if link.bands:
            _print_bands(link)
        if link.unclassified_share is not None:
            typer.echo(f"no lane claimed {link.unclassified_share:.1%} of the bytes")
        if link.trust is not None:
            typer.echo(f"trusted: {one_line(link.trust.describe())}")
        if link.refused is not None and link.refused.packets:
            lost = f"{link.refused.packets} packets, {link.refused.bytes} bytes"
            typer.echo(f"refused: {lost} of others bore a lane's DSCP, which was cleared")


def _print_bands(link: LinkStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("band")
    for title in ("priority", "dscp", "packets", "bytes", "backlog", "drops"):
        table.add_column(title, justify="right")
    for band in link.bands:
        marks = ["-" if mark is None else str(mark) for mark in (band.priority, band.dscp)]
        counts = (band.packets, band.bytes, band.backlog_bytes, band.drops)
        table.add_row(band.name, *marks, *map(str, counts))
    Console(highlight=False).print(table)
