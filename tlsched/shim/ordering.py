"""Whether the kernel orders the lanes: is tlsched attached where the lanes' packets leave?

Read with iproute2's JSON, which needs no privilege. Training never depends on the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from typing import Any, cast

from tlsched.bands import MAJOR

TIMEOUT_S = 5.0
# Where tc lies, which are not on an ordinary user's PATH on Debian.
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")


def what_orders_nothing(pairs: Iterable[tuple[str, str]]) -> str | None:
    """What to say of the interfaces in :func:`unordered_interfaces`, None when there is none."""
    interfaces = unordered_interfaces(pairs)
    if interfaces is None:
        return (
            "whether the kernel orders the lanes is unknown, because `ip` and `tc` cannot be run "
            "here: see `tlsched status` on the host"
        )
    if not interfaces:
        return None
    return (
        f"the kernel does not order the lanes on {', '.join(interfaces)}: "
        f"run `tlsched attach --iface {interfaces[0]} --rate …` there as root"
    )


def unordered_interfaces(pairs: Iterable[tuple[str, str]]) -> list[str] | None:
    """Names of the interfaces that connections leave by and that carry no tlsched tree.

    ``pairs`` are the connections' own and peer's IP addresses. A connection to an address of this
    host stays within the kernel: it passes no link, so there is nothing to order. None if unknown.
    """
    links = _read_json("ip", "-json", "address", "show")
    qdiscs = _read_json("tc", "-json", "qdisc", "show")
    if links is None or qdiscs is None:
        return None
    interface_of = {
        address["local"]: link["ifname"]
        for link in links
        for address in link.get("addr_info", [])
        if "local" in address
    }
    used = {
        interface_of[own] for own, peer in pairs if own in interface_of and peer not in interface_of
    }
    ordered = {q["dev"] for q in qdiscs if q.get("root") and q.get("handle") == f"{MAJOR:x}:"}
    return sorted(used - ordered)


def _read_json(*argv: str) -> list[dict[str, Any]] | None:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS))
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
            env=os.environ | {"PATH": path},
        )
        return cast("list[dict[str, Any]]", json.loads(done.stdout or b"[]"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
