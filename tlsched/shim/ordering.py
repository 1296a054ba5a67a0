"""Whether the kernel orders the lanes: is tlsched attached where the lanes' packets leave?

Read with iproute2's JSON, which needs no privilege. Training never depends on the answer.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from typing import Any, cast

from tlsched.bands import MAJOR

TIMEOUT_S = 5.0


def unordered_interfaces(local_addresses: Iterable[str]) -> list[str] | None:
    """Names of the interfaces with these addresses that carry no tlsched tree; None if unknown."""
    wanted = set(local_addresses)
    links = _read_json("ip", "-json", "address", "show")
    qdiscs = _read_json("tc", "-json", "qdisc", "show")
    if links is None or qdiscs is None:
        return None
    used = {
        link["ifname"]
        for link in links
        if any(address.get("local") in wanted for address in link.get("addr_info", []))
    }
    ordered = {q["dev"] for q in qdiscs if q.get("root") and q.get("handle") == f"{MAJOR:x}:"}
    return sorted(used - ordered)


def _read_json(*argv: str) -> list[dict[str, Any]] | None:
    try:
        done = subprocess.run(argv, capture_output=True, timeout=TIMEOUT_S, check=True)
        return cast("list[dict[str, Any]]", json.loads(done.stdout or b"[]"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
