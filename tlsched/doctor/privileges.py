"""Which of the capabilities that tlsched's commands need this process has (capabilities(7))."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.capabilities import CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN, held
from tlsched.doctor.finding import Finding

_REMEDY = "run as root (sudo); in a container, add this capability"


def findings() -> Iterator[Finding]:
    """What is missing, and which commands will not do because of it."""
    have = held()
    missing = False
    if CAP_NET_ADMIN not in have:
        missing = True
        yield Finding("blocker", "CAP_NET_ADMIN is missing: attach changes a link", _REMEDY)
    if not have & {CAP_BPF, CAP_SYS_ADMIN}:
        missing = True
        yield Finding("warning", "CAP_BPF is missing: attach makes do with u32 filters", _REMEDY)
    if CAP_SYS_ADMIN not in have:
        missing = True
        yield Finding(
            "warning", "CAP_SYS_ADMIN is missing: status, top and metrics need it", _REMEDY
        )
    if not missing:
        yield Finding("ok", "the capabilities that all commands need are there")
