"""`tlsched plan`: what scheduling would gain, before anything is installed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
from tlsched.config import format_rate
from tlsched.errors import ConfigError, FeatureMissing

if TYPE_CHECKING:
    from tlsched.planning.compare import Expected
    from tlsched.planning.fabric import Fabric
    from tlsched.planning.plan import Plan
    from tlsched.planning.profile import Profile

_FLOPS = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)([gtp]?)(?:flops?)?")
_FLOPS_UNITS = {"": 1.0, "g": 1e9, "t": 1e12, "p": 1e15}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="plan")(plan)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="vgg16, resnet50, bert-large, gpt2-medium, llama-24, or package.module:function "
            "that returns a module and the tuple of its inputs."
        ),
    ] = None,
    rates: Rates = ["10gbit"],  # noqa: B006  # typer copies it
    hosts: Hosts = 8,
    flops: Annotated[
        str, typer.Option(help="What one host computes a second, in practice: 60t is 60 TFLOP/s.")
    ] = "60t",
    batch: Annotated[
        int, typer.Option(min=1, help="Samples a host and iteration, for the built-in models.")
    ] = 8,
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="A measured profile (run.profile.save), instead of MODEL."),
    ] = None,
    backend: Backend = "allreduce",
    servers: Servers = 0,
    step_us: StepUs = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the timelines into this .png, .svg or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what scheduling would gain: seconds an iteration under each policy, and the lanes.

    Everything is computed here: no GPU, no root, no network. The model is walked on torch's meta
    device; how long it computes follows from its FLOPs and --flops, or from a measured --profile.

        tlsched plan gpt2-medium --rate 10gbit --rate 100gbit --hosts 16 --flops 120t

    Exit codes: 0, also where nothing is to be gained; 2 bad input or missing feature.
    """
    from tlsched.cli.picture import draw, require_matplotlib
    from tlsched.planning.compare import SIMULATED, expect, verdict
    from tlsched.planning.planner import plan_for

    wanted = fabrics(rates, hosts, backend, servers, step_us)
    if picture is not None:
        require_matplotlib()
    profile = _profile(model, profile_file, _flops(flops), batch)
    answers = []
    for fabric in wanted:
        chosen = plan_for(profile, fabric)
        found = expect(profile, fabric, SIMULATED, plan=chosen)
        line = verdict(found, profile, fabric, format_rate(int(fabric.rate_bps)))
        answers.append((fabric, found, chosen, line))
    title = model or str(profile_file)
    if as_json:
        typer.echo(json.dumps([_answer(profile, *answer) for answer in answers], indent=2))
    else:
        console = Console(highlight=False)
        for fabric, found, chosen, line in answers:
            console.print(escape(heading(title, fabric, profile)), soft_wrap=True)
            console.print(policy_table(profile, fabric, found))
            console.print(_lane_table(chosen))
            console.print(escape(line), soft_wrap=True)
    if picture is not None:
        fabric, found, _, line = answers[0]
        shown = [found[name] for name in ("ddp", "fifo", "kernel", "oracle")]
        draw(shown, f"{heading(title, fabric, profile)}\n{line}", picture)


def _flops(text: str) -> float:
    """FLOP/s as people write them: 60t, 1.5e14, 90TFLOP."""
    match = _FLOPS.fullmatch(text.lower().removesuffix("/s"))
    try:
        value = float(match[1]) * _FLOPS_UNITS[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f'FLOP rate "{text}" is not understood', hint="write it like 60t or 6e13")
    return value


def _profile(model: str | None, file: Path | None, flops_per_s: float, batch: int) -> Profile:
    """The measured profile when there is one, else the model's."""
    from tlsched.planning.profile import load_profile

    if (model is None) == (file is None):
        raise ConfigError(
            "give either a model or a profile", hint="see `tlsched plan --help` for both"
        )
    if file is not None:
        return load_profile(file)
    if find_spec("torch") is None:
        raise FeatureMissing(
            "walking a model needs torch", hint="pip install torch, or give a --profile"
        )
    from tlsched.shapes.derive import profile_of_layers, training_flops
    from tlsched.shapes.load import load_layers

    assert model is not None
    layers = load_layers(model)
    samples = 1 if ":" in model else batch  # the user's inputs are a batch already
    return profile_of_layers(layers, compute_s=samples * training_flops(layers) / flops_per_s)


def _lane_table(chosen: Plan) -> Table:
    table = Table("lane", "buckets", "MB", "first", "last", title="lanes of policy kernel")
    for lane in sorted({bucket.lane for bucket in chosen.buckets}):
        members = [bucket for bucket in chosen.buckets if bucket.lane == lane]
        table.add_row(
            str(lane),
            str(len(members)),
            f"{sum(bucket.bytes for bucket in members) / 1e6:.1f}",
            escape(members[0].names[0]),
            escape(members[-1].names[-1]),
        )
    return table


def _answer(
    profile: Profile, fabric: Fabric, found: dict[str, Expected], chosen: Plan, line: str
) -> dict[str, Any]:
    return {
        "verdict": line,
        "policies": [row(profile, fabric, one, False) for one in found.values()],
        "buckets": [asdict(bucket) for bucket in chosen.buckets],
        "launch_order": list(chosen.launch_order),
    }
