"""`tlsched install-unit`: the systemd unit that attaches at boot."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tlsched import unitfiles
from tlsched.errors import PermissionMissing

NEXT = (
    "edit /etc/tlsched/tlsched.toml: give each interface a section",
    "systemctl daemon-reload",
    'systemctl enable --now "$(systemd-escape --template=tlsched@.service eth0)"',
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("install-unit")(install_unit)


def install_unit(
    root: Annotated[
        Path,
        typer.Option(help="Install below this folder, as into an image that is not running."),
    ] = Path("/"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files that would be written, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Install the systemd unit `tlsched@.service` and a sample of its configuration.

    The unit attaches an interface as soon as it is there, by its section in
    /etc/tlsched/tlsched.toml; it is installed, not enabled. A configuration that exists is kept.

    Examples:

      tlsched install-unit --dry-run

      tlsched install-unit

      systemctl daemon-reload

      systemctl enable --now tlsched@eth0

      systemctl reload tlsched@eth0

    To remove it: `systemctl disable --now tlsched@eth0`, then delete
    /etc/systemd/system/tlsched@.service and /etc/tlsched.

    Exit codes: 0 installed (or already so), 2 nothing was installed.
    """
    files = unitfiles.plan(root, unitfiles.installed_command())
    if not dry_run:
        if root == Path("/") and os.geteuid() != 0:
            raise PermissionMissing("only root may install a unit", hint="run it as root")
        unitfiles.write(files)
    if as_json:
        listed = [{"path": str(file.path), "result": file.result} for file in files]
        typer.echo(json.dumps({"files": listed, "next": NEXT, "dry_run": dry_run}, indent=2))
        return
    for file in files:
        typer.echo(f"{file.path}: {file.result}")
        if dry_run and file.changes:
            typer.echo(f"\n{file.text}")
    if dry_run:
        typer.echo("dry run: nothing was changed")
        return
    if shutil.which("systemctl") is None:
        typer.echo("this host has no systemctl: the unit is of use only under systemd")
    for step in NEXT:
        typer.echo(f"next: {step}")
