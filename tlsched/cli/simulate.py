"""`tlsched simulate`: a measured profile under some policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tlsched.cli.forecast import (
    Backend,
    Hosts,
    Json,
    Rates,
    Servers,
    StepUs,
    fabrics,
    heading,
    policy_table,
    row,
)
from tlsched.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="simulate")(simulate)


def simulate(
    profile_file: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="What run.profile.save() wrote.")
    ],
    rates: Rates = ["10gbit"],  # noqa: B006  # typer copies it
    hosts: Hosts = 8,
    policies: Annotated[
        list[str],
        typer.Option(
            "--policy",
            help="ddp, sync, fifo, bytescheduler, prophet, lanes, kernel or "
            "oracle; several by commas or by giving it again.",
        ),
    ] = ["ddp,fifo,kernel,oracle"],  # noqa: B006  # typer copies it
    bulk_flows: Annotated[
        int, typer.Option(min=0, help="Flows that leave every host all the time, beside training.")
    ] = 0,
    backend: Backend = "allreduce",
    servers: Servers = 0,
    step_us: StepUs = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="With --json: each bucket's times as well.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate an iteration of a measured profile under some policies.

        tlsched simulate profile.json --rate 10gbit --hosts 64 --policy fifo,kernel

    Exit codes: 0; 2 bad input.
    """
    from tlsched.planning.compare import expect
    from tlsched.planning.profile import load_profile

    names = [name.strip() for text in policies for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("no policy is named", hint="give --policy kernel, or several by commas")
    wanted = fabrics(rates, hosts, backend, servers, step_us, bulk_flows)
    profile = load_profile(profile_file)
    answers = [(fabric, expect(profile, fabric, names)) for fabric in wanted]
    if as_json:
        rows = [
            row(profile, fabric, one, timeline)
            for fabric, found in answers
            for one in found.values()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console(highlight=False)
    for fabric, found in answers:
        title = heading(str(profile_file), fabric, profile)
        console.print(escape(title), soft_wrap=True)
        console.print(policy_table(profile, fabric, found))
