"""What `tlsched plan` and `tlsched simulate` share: their options, and how they show figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from tlsched.config import format_rate, parse_rate
from tlsched.errors import ConfigError

if TYPE_CHECKING:
    from tlsched.planning.compare import Expected
    from tlsched.planning.fabric import Fabric
    from tlsched.planning.profile import Profile

Rates = Annotated[
    list[str], typer.Option("--rate", help="Rate of every host's link. May be given several times.")
]
Hosts = Annotated[int, typer.Option("--hosts", min=2, help="How many hosts train together.")]
Backend = Annotated[
    str,
    typer.Option("--backend", help="How gradients are averaged: allreduce (a ring), or ps."),
]
Servers = Annotated[
    int,
    typer.Option(
        "--servers", min=0, help="With --backend ps: servers with hosts of their own; 0: none."
    ),
]
StepUs = Annotated[
    float | None,
    typer.Option("--step-us", min=0, help="Microseconds that a step of the ring costs besides."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fabrics(
    rates: list[str],
    hosts: int,
    backend: str,
    servers: int,
    step_us: float | None,
    bulk_flows: int = 0,
) -> list[Fabric]:
    """One for each of ``rates``. Raises ConfigError."""
    from tlsched.planning.fabric import STEP_S, Fabric

    if backend not in ("allreduce", "ps"):
        raise ConfigError(f'there is no backend "{backend}"', hint="use allreduce or ps")
    if servers and backend != "ps":
        raise ConfigError("--servers is for parameter servers", hint="add --backend ps")
    return [
        Fabric(
            hosts,
            parse_rate(rate),
            step_s=STEP_S if step_us is None else step_us * 1e-6,
            bulk_flows=bulk_flows,
            backend=cast("Any", backend),
            servers=servers,
        )
        for rate in rates
    ]


def heading(title: str, fabric: Fabric, profile: Profile) -> str:
    """What is trained, and on what."""
    return (
        f"{title}: {fabric.hosts} hosts at {format_rate(int(fabric.rate_bps))}, "
        f"{profile.bytes / 1e6:.1f} MB of gradients, computing {profile.compute_s:.4g} s"
    )


def policy_table(profile: Profile, fabric: Fabric, found: dict[str, Expected]) -> Table:
    """A row a policy, and the floor."""
    from tlsched.planning.compare import floor_s

    table = Table()
    for name in ("policy", "buckets", "s/iteration", "x ddp", "link use"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for one in found.values():
        table.add_row(
            one.policy,
            str(len(one.profile.buckets)),
            f"{one.iteration_s:.4g}",
            f"{found['ddp'].iteration_s / one.iteration_s:.2f}" if "ddp" in found else "-",
            f"{one.simulated.link_use:.0%}",
        )
    floor = floor_s(profile, fabric)
    table.add_row("floor", "-", f"{floor:.4g}", "-", "-")
    return table


def row(profile: Profile, fabric: Fabric, one: Expected, timeline: bool) -> dict[str, Any]:
    """A policy\'s figures, for machines."""
    from tlsched.planning.compare import floor_s

    row: dict[str, Any] = {
        "policy": one.policy,
        "hosts": fabric.hosts,
        "rate_bps": fabric.rate_bps,
        "backend": fabric.backend,
        "buckets": len(one.profile.buckets),
        "iteration_s": one.iteration_s,
        "link_use": one.simulated.link_use,
        "compute_s": profile.compute_s,
        "communication_s": fabric.seconds(profile.bytes),
        "floor_s": floor_s(profile, fabric),
    }
    if timeline:
        row["timeline"] = [
            {"names": bucket.names, "bytes": bucket.bytes, **asdict(times)}
            for bucket, times in zip(one.profile.buckets, one.simulated.timeline, strict=True)
        ]
    return row
