"""What a benchmark records about the lab that it ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from tlsched.lab import iproute, namespaces
from tlsched.lab.topology import Topology, burst_bytes, queue_bytes

_SYSCTLS = (
    "net/core/default_qdisc",
    "net/ipv4/tcp_allowed_congestion_control",
    "net/ipv4/tcp_congestion_control",
    "net/ipv4/tcp_ecn",
    "net/ipv4/tcp_limit_output_bytes",
    "net/ipv4/tcp_mem",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_wmem",
)


def description(topology: Topology) -> dict[str, Any]:
    """The lab as JSON-ready data; sizes in bytes, rates in bits per second."""
    return {
        "name": topology.name,
        "rate_bps": topology.rate_bps,
        "burst_bytes": burst_bytes(topology.rate_bps),
        "queue_bytes": queue_bytes(topology.rate_bps),
        "machine": {
            "kernel": platform.release(),
            "arch": platform.machine(),
            "cpus": os.cpu_count(),
            "iproute2": iproute.version(),
        },
        "switch": _link(topology.switch),
        "hosts": [
            {
                "name": host.name,
                "namespace": host.namespace,
                "ipv4": host.ipv4,
                "ipv6": host.ipv6,
                "sysctls": namespaces.inside(host.namespace, _sysctls),
                **_link(host.namespace),
            }
            for host in topology.hosts
        ],
    }


def _sysctls() -> dict[str, str]:
    values = {}
    for name in _SYSCTLS:
        path = Path("/proc/sys") / name
        if path.exists():  # some belong to the first namespace alone
            values[name.replace("/", ".")] = " ".join(path.read_text().split())
    return values


def _link(namespace: str) -> dict[str, Any]:
    return {
        "links": iproute.query("ip", ["-details", "link", "show"], namespace),
        "qdiscs": iproute.query("tc", ["-statistics", "qdisc", "show"], namespace),
    }
