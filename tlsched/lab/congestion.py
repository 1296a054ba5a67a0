"""The hosts' TCP congestion control: cubic, unless another one is asked for.

A network namespace may choose only what the first one allows to everybody
(``net.ipv4.tcp_allowed_congestion_control``, ip-sysctl.rst), and each new namespace starts with the
first one's default, which is BBR on some machines. So the first namespace's list is extended while
labs exist, and put back when the last one goes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tlsched.errors import FeatureMissing
from tlsched.lab.state import STATE_DIR

NAME = "cubic"
_SYSCTL = Path("/proc/sys/net/ipv4")
_DEFAULT = _SYSCTL / "tcp_congestion_control"
_ALLOWED = _SYSCTL / "tcp_allowed_congestion_control"
_AVAILABLE = _SYSCTL / "tcp_available_congestion_control"
_BEFORE = STATE_DIR / ".congestion"  # not *.json: those are labs


def available() -> list[str]:
    """What this kernel has, loaded or built in."""
    return _AVAILABLE.read_text().split()


def allow(name: str = NAME) -> None:
    """Let namespaces choose ``name``. Call it in the first namespace, with the labs locked.

    Raises FeatureMissing when the kernel has none of that name.
    """
    allowed = _ALLOWED.read_text().split()
    if name in allowed:
        return
    if name not in available():
        raise FeatureMissing(
            f"this kernel has no {name} congestion control", hint=f"try: modprobe tcp_{name}"
        )
    extended = [*allowed, name]
    # The record comes first: whoever is killed in between leaves one that changes nothing.
    saved = _BEFORE.read_text() if _BEFORE.exists() else None
    before = json.loads(saved)["before"] if saved else allowed
    _BEFORE.write_text(json.dumps({"before": before, "after": extended}))
    try:
        _ALLOWED.write_text(" ".join(extended))
    except OSError as error:  # a container's namespace, or a read-only /proc/sys
        if saved is None:
            _BEFORE.unlink()
        else:
            _BEFORE.write_text(saved)
        command = f'sysctl -w "net.ipv4.{_ALLOWED.name}={" ".join(extended)}"'
        raise FeatureMissing(
            f"{name} cannot be allowed to namespaces from here ({error.strerror})",
            hint=f"on the machine itself: {command}",
        ) from None


def choose(name: str = NAME) -> None:
    """Make ``name`` the default of the current namespace, for sockets that are opened from now."""
    _DEFAULT.write_text(name)


def restore() -> None:
    """Put the first namespace's list back, unless somebody else has changed it meanwhile."""
    if not _BEFORE.exists():
        return
    saved = json.loads(_BEFORE.read_text())
    allowed = set(_ALLOWED.read_text().split())
    if set(saved["before"]) <= allowed <= set(saved["after"]):
        _ALLOWED.write_text(" ".join(saved["before"]))
    _BEFORE.unlink()
