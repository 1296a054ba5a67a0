"""run, mark, unmark, marks: lanes for programs that know nothing of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlsched.bands import LANE_COUNT
from tlsched.cli.command import become, check_runs
from tlsched.cli.output import one_line
from tlsched.config import parse_dscps

if TYPE_CHECKING:
    from tlsched.bands import Band
    from tlsched.marking import Marking, Outcome

Lane = Annotated[
    int, typer.Option(min=0, max=LANE_COUNT - 1, help="The lane; 0 is the most urgent.")
]
Dscps = Annotated[
    str | None,
    typer.Option(
        help="The lanes' code points, if other than those of the links that are attached here."
    ),
]
Cgroup = Annotated[
    str, typer.Option(help="The cgroup (version 2): its folder, or its name in /proc/PID/cgroup.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be changed, and stop.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the four commands to ``app``."""
    app.command(context_settings={"allow_interspersed_args": False})(run)
    app.command()(mark)
    app.command()(unmark)
    app.command()(marks)


def run(
    command: Annotated[list[str], typer.Argument(help="The command, after `--`.")],
    lane: Lane,
    dscps: Dscps = None,
) -> None:
    """Run a command whose TCP connections are in a lane; it needs to know nothing of it.

    The command gets a cgroup of its own, below the present one, whose TCP sockets the kernel marks
    when they connect, listen or accept: IPv4 and IPv6, and IPv4 peers of an IPv6 socket (these from
    Linux 6.13 on). Not marked: UDP and everything else that is not TCP; sockets that were made
    elsewhere, such as one that systemd hands over; what the command sets on an open connection
    itself.

    This process becomes the command: signals and exit code are the command's own. When the command
    and all that it started have ended, the cgroup is removed. A run inside a run, or inside a
    cgroup that `mark` marked, has its own lane. Needs CAP_BPF and CAP_NET_ADMIN, and the right to
    make a cgroup; the command runs as whoever runs tlsched.

    Examples:

      tlsched run --lane 2 -- iperf3 -c 10.0.0.2

      tlsched run --lane 1 -- runuser -u train -- python train.py

    Exit codes: the command's; 127 there is no such command, 126 it may not be run, 2 bad input,
    missing permission or missing feature: the command was not started.
    """
    from tlsched import runs

    wanted = command[1:] if command[0] == "--" else command
    if not wanted:
        raise typer.BadParameter("there is no command after --")
    check_runs(wanted[0])
    with runs.enclosure(_band(lane, dscps)) as enclosure:
        enclosure.enter()
        become(wanted)


def mark(
    cgroup: Cgroup,
    lane: Lane,
    dscps: Dscps = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Put the TCP connections of a cgroup into a lane, until `unmark` or the end of the cgroup.

    Marked are connections that are opened from now on by sockets made in the cgroup or below it, as
    `tlsched run --help` says; those that are open already stay as they are. Marking again with
    another lane changes it, with the same one does nothing. Of several marked cgroups around a
    process the innermost decides. BPF programs of others on the cgroup keep running.

    Examples:

      tlsched mark --cgroup /sys/fs/cgroup/system.slice/backup.service --lane 5

      tlsched mark --lane 0 --cgroup "$(systemctl show -P ControlGroup train.service)"

    Exit codes: 0 marked (or already so), 1 the mark did not stay, 2 bad input, missing permission
    or missing feature: nothing was changed.
    """
    from tlsched import cgroups, marking

    band = _band(lane, dscps)
    _print_outcome(marking.mark(cgroups.find(cgroup), band, dry_run=dry_run), as_json)


def unmark(cgroup: Cgroup, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Take tlsched's mark off a cgroup, and nothing else.

    Connections that were opened while it was marked stay in their lane until they close.

    Example:

      tlsched unmark --cgroup /sys/fs/cgroup/system.slice/backup.service

    Exit codes: as of mark; 0 also where nothing was marked.
    """
    from tlsched import cgroups, marking

    _print_outcome(marking.unmark(cgroups.find(cgroup), dry_run=dry_run), as_json)


def marks(as_json: Json = False) -> None:
    """Show which cgroups are marked, those of `run` among them.

    Everything is read from the kernel. Exit codes: 0, also where none is marked; 2 missing
    permission or missing feature.
    """
    from tlsched import marking

    found = marking.markings()
    if as_json:
        _print_json([each.as_dict() for each in found])
    elif found:
        _print_markings(found)
    else:
        typer.echo("no cgroup is marked")


def _band(lane: int, dscps: str | None) -> Band:
    from tlsched import marking

    return marking.lane_band(lane, None if dscps is None else parse_dscps(dscps))


def _print_outcome(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        _print_json(outcome.as_dict())
        return
    lane = "not marked" if outcome.lane is None else f"lane {outcome.lane}"
    would = outcome.dry_run and outcome.result != "unchanged"
    said = f"{one_line(outcome.cgroup)}: {outcome.result} ({lane})"
    typer.echo(said + (" (dry run: nothing was changed)" if would else ""))
    if outcome.processes and outcome.result != "unchanged":
        count = f"{outcome.processes} process" + ("es" if outcome.processes > 1 else "")
        typer.echo(f"connections that {count} in it may have open stay as they are")


def _print_markings(found: list[Marking]) -> None:
    typer.echo("lane  priority  dscp  processes  cgroup")
    for each in found:
        lane, priority, dscp = (
            "-" if value is None else value for value in (each.lane, each.priority, each.dscp)
        )
        numbers = f"{lane:>4}  {priority:>8}  {dscp:>4}  {each.processes:>9}"
        typer.echo(f"{numbers}  {one_line(each.cgroup)}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
