"""The command line inside a namespace, and all that a link has, for comparing before and after."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.netns import Namespace
from tlsched import control
from tlsched.config import LinkSettings, parse_rate
from tlsched.control import LinkStatus, Outcome

TLSCHED = [sys.executable, "-c", "from tlsched.cli import main; main()"]


def tlsched(
    where: Namespace, *argv: str, code: int = 0, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``tlsched ARGV`` inside; fails unless it ends with exit ``code``."""
    done = where.run(*prefix, *TLSCHED, *argv, check=False)
    said = f"tlsched {' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == code, said
    if code in (1, 2):
        assert len(done.stderr.splitlines()) == 1, said
        assert "Traceback" not in done.stderr, said
    return done


def tlsched_json(where: Namespace, *argv: str, code: int = 0) -> Any:
    """The same with --json, decoded."""
    return json.loads(tlsched(where, *argv, "--json", code=code).stdout)


def snapshot(where: Namespace, dev: str) -> dict[str, str]:
    """What tc and bpffs show of a link: equal before attach and after detach."""
    shown = {
        "qdisc": where.run("tc", "qdisc", "show", "dev", dev).stdout,
        "class": where.run("tc", "class", "show", "dev", dev).stdout,
    }
    for hook in ("ingress", "egress"):
        # tc complains where there is no clsact, and that is as good as no filter
        shown[hook] = where.run("tc", "filter", "show", "dev", dev, hook, check=False).stdout
    pins = Path("/sys/fs/bpf")
    shown["bpffs"] = str(sorted(map(str, pins.rglob("*")))) if pins.is_dir() else ""
    return shown


def attach(
    where: Namespace,
    dev: str,
    rate: str | None = "1gbit",
    replace_root: bool = False,
    dry_run: bool = False,
    **more: Any,
) -> Outcome:
    """Attach a link from this process: no second interpreter to start."""
    settings = LinkSettings(dev, None if rate is None else parse_rate(rate), **more)
    return where.call(control.attach, settings, replace_root=replace_root, dry_run=dry_run)


def detach(where: Namespace, dev: str) -> Outcome:
    """Detach a link from this process."""
    return where.call(control.detach, dev)


def status(where: Namespace, dev: str | None = None) -> list[LinkStatus]:
    """The state of a link, or of all that are attached, from this process."""
    return where.call(control.status, dev)


def state(where: Namespace, dev: str) -> str:
    """The state of one link in a word."""
    return status(where, dev)[0].state
