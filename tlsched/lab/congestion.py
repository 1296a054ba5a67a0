"""Cubic as the hosts' TCP congestion control.

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


def allow() -> None:
    """Let namespaces choose cubic. Call it in the first namespace, with the labs locked.

    Raises FeatureMissing when the kernel has no cubic.
    """
    allowed = _ALLOWED.read_text().split()
    if NAME in allowed:
        return
    if NAME not in _AVAILABLE.read_text().split():
        raise FeatureMissing(
            f"this kernel has no {NAME} congestion control", hint=f"try: modprobe tcp_{NAME}"
        )
    extended = [*allowed, NAME]
    # The record comes first: whoever is killed in between leaves one that changes nothing.
    _BEFORE.write_text(json.dumps({"before": allowed, "after": extended}))
    try:
        _ALLOWED.write_text(" ".join(extended))
    except OSError as error:  # a container's namespace, or a read-only /proc/sys
        _BEFORE.unlink()
        command = f'sysctl -w "net.ipv4.{_ALLOWED.name}={" ".join(extended)}"'
        raise FeatureMissing(
            f"{NAME} cannot be allowed to namespaces from here ({error.strerror})",
            hint=f"on the machine itself: {command}",
        ) from None


def choose() -> None:
    """Make cubic the default of the current namespace."""
    _DEFAULT.write_text(NAME)


def restore() -> None:
    """Put the first namespace's list back, unless somebody else has changed it meanwhile."""
    if not _BEFORE.exists():
        return
    saved = json.loads(_BEFORE.read_text())
    if sorted(_ALLOWED.read_text().split()) == sorted(saved["after"]):
        _ALLOWED.write_text(" ".join(saved["before"]))
    _BEFORE.unlink()
