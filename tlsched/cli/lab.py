"""`tlsched lab`: an emulated cluster that stays until it is taken down."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tlsched.cli.command import become, check_runs
from tlsched.config import format_rate, parse_rate
from tlsched.errors import ConfigError, LabError
from tlsched.lab import Lab, remove_orphans, state
from tlsched.lab.iproute import require

DEFAULT_NAME = "lab"

lab_app = typer.Typer(
    help="An emulated cluster: hosts in network namespaces, every link limited to one rate.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Option("--name", help="Which lab, if there are several.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the `lab` commands to ``app``."""
    app.add_typer(lab_app, name="lab")


@lab_app.command()
def up(
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of every link, both ways.")] = "1gbit",
    name: Name = DEFAULT_NAME,
    as_json: Json = False,
) -> None:
    """Build a lab. It stays, also without any process, until `tlsched lab down`.

    A lab whose building was interrupted is removed and built anew.

    Exit codes: 0 up (or already so), 1 it could not be built, or another lab has this name,
    2 bad input, missing permission or missing feature: nothing was changed.
    """
    lab = Lab(hosts, parse_rate(rate), name)
    existing = state.find(name)
    whole = existing is not None and existing.builder is None and not existing.orphaned()
    built = not whole and lab.ensure()
    if not built:
        _check_same(lab)
    outcome = "up" if built else "unchanged"
    if as_json:
        _print_json({"outcome": outcome, **_summary(name)})
        return
    console = Console(highlight=False)
    console.print(f"lab {name}: {outcome}, {hosts} hosts, {format_rate(lab.rate_bps)} both ways")
    console.print(_host_table(lab))
    console.print(f"next: tlsched lab exec{_option(name)} h0 -- ip address", soft_wrap=True)


@lab_app.command(
    "exec", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True}
)
def execute(
    host: Annotated[str, typer.Argument(help="h0, h1, …")],
    command: Annotated[list[str], typer.Argument(help="The command, after `--`.")],
    name: Name = DEFAULT_NAME,
) -> None:
    """Run a command in a host; its output, signals and exit code are the command's own.

    Exit codes: the command's; 127 there is no such command, 126 it may not be run, 2 no such lab
    or host, or missing permission.
    """
    lab = Lab.open(name)
    names = [known.name for known in lab.hosts]
    if host not in names:
        raise ConfigError(f"lab {name} has no host {host}", hint=f"it has {', '.join(names)}")
    wanted = command[1:] if command[0] == "--" else command
    argv = lab.command(names.index(host), wanted)
    require()
    check_runs(wanted[0])  # hosts share the machine's files: what is missing here is missing there
    become(argv)


@lab_app.command()
def status(as_json: Json = False) -> None:
    """Show the labs of this machine, their owners and what runs in them.

    States: up, building, broken (a namespace is lost, or its building was interrupted), orphaned
    (its owner was killed; the next lab removes it). Exit code: 0, also where no lab is up.
    """
    names = [record.topology.name for record in state.records()]
    if as_json:
        _print_json([_summary(name) for name in names])
        return
    console = Console(highlight=False)
    if not names:
        console.print("no lab is up")
        return
    table = Table("lab", "hosts", "rate", "state", "owner", "processes")
    for summary in map(_summary, names):
        owner = "-" if summary["owner_pid"] is None else f"process {summary['owner_pid']}"
        table.add_row(
            escape(summary["name"]),
            str(len(summary["hosts"])),
            format_rate(summary["rate_bps"]),
            summary["state"],
            owner,
            str(len(summary["processes"])),
        )
    console.print(table)


@lab_app.command()
def down(name: Name = DEFAULT_NAME) -> None:
    """End what runs in a lab and remove it; also remove labs whose owners were killed.

    Exit codes: 0 removed, or not up; 1 its owner still runs, or a process in it cannot be ended;
    2 missing permission.
    """
    require()
    known = state.find(name)
    if known is not None:
        Lab.open(name).down()
    orphans = [orphan for orphan in remove_orphans() if orphan != name]
    console = Console(highlight=False)
    console.print(f"lab {name}: {'removed' if known else 'not up, nothing to remove'}")
    for orphan in orphans:
        console.print(f"lab {orphan}: removed, its owner or builder had been killed")


def _check_same(lab: Lab) -> None:
    """Raise LabError unless the lab that is up is the one that was asked for, and whole."""
    there = Lab.open(lab.name)
    if (len(there.hosts), there.rate_bps) != (len(lab.hosts), lab.rate_bps):
        raise LabError(
            f"lab {lab.name} is up with {len(there.hosts)} hosts at {format_rate(there.rate_bps)}",
            hint=f"run `tlsched lab down{_option(lab.name)}` first, or choose another --name",
        )
    if not there.complete():
        raise LabError(
            f"lab {lab.name} has lost namespaces",
            hint=f"run `tlsched lab down{_option(lab.name)}`",
        )
    existing = state.find(lab.name)
    if existing is not None and existing.owner is not None:
        raise LabError(
            f"lab {lab.name} belongs to process {existing.owner.pid}", hint="choose another --name"
        )


def _summary(name: str) -> dict[str, Any]:
    lab = Lab.open(name)
    record = state.find(name)
    owner = record.owner if record else None
    condition = "up" if lab.complete() else "broken"
    if record and record.orphaned():
        condition = "broken" if record.unfinished() else "orphaned"
    elif record and record.builder:
        condition = "building"
    return {
        "name": lab.name,
        "state": condition,
        "rate_bps": lab.rate_bps,
        "owner_pid": owner.pid if owner else None,
        "hosts": [asdict(host) for host in lab.hosts],
        "processes": lab.processes(),
    }


def _host_table(lab: Lab) -> Table:
    table = Table("host", "namespace", "interface", "IPv4", "IPv6")
    for host in lab.hosts:
        table.add_row(host.name, host.namespace, host.iface, host.ipv4, host.ipv6)
    return table


def _option(name: str) -> str:
    return "" if name == DEFAULT_NAME else f" --name {name}"


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2))
