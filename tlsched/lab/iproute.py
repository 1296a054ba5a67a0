"""iproute2 by its batch and JSON interfaces: argument lists in, JSON out, no text taken apart."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from tlsched.capabilities import CAP_NET_ADMIN, CAP_SYS_ADMIN, held
from tlsched.errors import FeatureMissing, LabError, PermissionMissing
from tlsched.lab.state import lock_handles

TIMEOUT_S = 30.0
_NEEDED = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_CAPABILITIES = {"CAP_NET_ADMIN": CAP_NET_ADMIN, "CAP_SYS_ADMIN": CAP_SYS_ADMIN}
_KIND = re.compile(r"\b(veth|bridge|macvlan|htb|bfifo)\b")


def require() -> None:
    """Raise PermissionMissing or FeatureMissing unless labs can be built here. Changes nothing."""
    have = held()
    missing = [name for name, number in _CAPABILITIES.items() if number not in have]
    if missing:
        raise PermissionMissing(
            f"a lab needs {' and '.join(missing)}", hint="run it as root, for instance with sudo"
        )
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            raise FeatureMissing(f"`{program}` is not installed", hint=f"install {package}")


def batch(program: str, lines: Sequence[str], namespace: str | None = None) -> None:
    """Run ``lines`` by ``program`` (ip or tc), in ``namespace``; the first failure ends it.

    Raises FeatureMissing naming the kind of link or qdisc that the kernel lacks, else LabError.
    """
    argv = [program, *_in(namespace), "-batch", "-"]
    done = _run(argv, "\n".join(lines) + "\n")
    if done.returncode == 0:
        return
    line, reason = _failure(done.stderr, lines)
    kind = _KIND.search(line)
    if kind and re.search(r"unknown|not supported", reason, re.IGNORECASE):
        raise FeatureMissing(
            f"this kernel has no {kind[0]}: {reason}",
            hint=f"load or build the kernel's {kind[0]} support",
        )
    raise LabError(f"`{program} {line}` failed: {reason}", hint="see the kernel's log")


def query(program: str, arguments: Sequence[str], namespace: str | None = None) -> list[Any]:
    """What ``program -json`` says, as the list that it prints."""
    done = _run([program, "-json", *_in(namespace), *arguments], "")
    if done.returncode != 0:
        raise LabError(
            f"`{program} {' '.join(arguments)}` failed: {done.stderr.strip()}",
            hint="is the lab still up? see `tlsched lab status`",
        )
    return json.loads(done.stdout) if done.stdout.strip() else []


def version() -> str:
    """What ``ip -Version`` prints."""
    return _run(["ip", "-Version"], "").stdout.strip()


def _in(namespace: str | None) -> list[str]:
    return [] if namespace is None else ["-netns", namespace]


def _run(argv: Sequence[str], lines: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            input=lines,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            pass_fds=lock_handles(),
        )
    except subprocess.TimeoutExpired:
        raise LabError(
            f"`{' '.join(argv)}` took longer than {TIMEOUT_S:.0f} s",
            hint="look at the machine's load",
        ) from None


def _failure(stderr: str, lines: Sequence[str]) -> tuple[str, str]:
    """The line that failed and the reason, for people to read ("Command failed -:3")."""
    messages = [line.strip() for line in stderr.splitlines() if line.strip()]
    place = re.search(r"Command failed -:(\d+)", stderr)
    line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else lines[0]
    reasons = [message for message in messages if not message.startswith("Command failed")]
    return line, " ".join(reasons) or "no reason given"
