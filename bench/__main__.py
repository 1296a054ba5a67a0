"""`python -m bench`: the benchmarks' command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bench import host_commands, report_commands, sharing_commands, training_commands
from bench.shown import RESULTS, Quick

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
for commands in (training_commands, sharing_commands, host_commands, report_commands):
    app.add_typer(commands.app)


@app.command("all")
def all_command(
    quick: Quick = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
) -> None:
    """Everything, with the results as JSON: about 30 minutes; with --quick, under 4."""
    for name, command in _commands().items():
        command(quick=quick, json_file=out / f"{name}.json")


def _commands() -> dict[str, Callable[..., None]]:
    """What `all` runs, the longest last."""
    return {
        "classifier": host_commands.classifier_command,
        "host": host_commands.host_command,
        "attach": host_commands.attach_command,
        "shaping": host_commands.shaping_command,
        "bucket": host_commands.bucket_command,
        "simulator": host_commands.simulator_command,
        "overhead": training_commands.overhead_command,
        "congestion": sharing_commands.congestion_command,
        "rate-change": sharing_commands.rate_change_command,
        "contention": sharing_commands.contention_command,
        "scale": training_commands.scale_command,
        "real": training_commands.real_command,
        "two-jobs": sharing_commands.two_jobs_command,
        "step": training_commands.every_step,
    }


if __name__ == "__main__":
    app()
