"""`python -m bench`: the benchmarks' command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import host_commands, report_commands, training_commands
from bench.shown import RESULTS

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
for commands in (training_commands, host_commands, report_commands):
    app.add_typer(commands.app)


@app.command("all")
def all_command(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
) -> None:
    """Everything, with the results as JSON: about eight minutes."""
    host_commands.classifier_command(json_file=out / "classifier.json")
    host_commands.host_command(json_file=out / "host.json")
    host_commands.attach_command(json_file=out / "attach.json")
    host_commands.shaping_command(json_file=out / "shaping.json")
    host_commands.bucket_command(json_file=out / "bucket.json")
    host_commands.simulator_command(json_file=out / "simulator.json")
    training_commands.overhead_command(json_file=out / "overhead.json")
    training_commands.step_command(json_file=out / "step.json")


if __name__ == "__main__":
    app()
