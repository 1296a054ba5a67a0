"""What a benchmark records about the lab that it ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from tlsched.errors import LabError
from tlsched.lab import iproute, namespaces
from tlsched.lab.topology import NIC, Topology, burst_bytes, port, queue_bytes

_SYSCTLS = (
    "net/core/default_qdisc",
    "net/core/rmem_default",
    "net/core/rmem_max",
    "net/core/wmem_default",
    "net/core/wmem_max",
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
                "sysctls": namespaces.inside(host.namespace, sysctls),
                "offloads": namespaces.inside(host.namespace, lambda: namespaces.offloads(NIC)),
                **_link(host.namespace),
            }
            for host in topology.hosts
        ],
    }


def sysctls() -> dict[str, str]:
    """The current namespace's settings that decide how TCP behaves."""
    values = {}
    for name in _SYSCTLS:
        path = Path("/proc/sys") / name
        if path.exists():  # some belong to the first namespace alone
            values[name.replace("/", ".")] = " ".join(path.read_text().split())
    return values


def counters(topology: Topology) -> dict[str, dict[str, int]]:
    """What each link's limiters have sent so far, by host (``h0``) and by switch port (``port0``).

    ``bytes`` with Ethernet headers and ``packets`` (tc-htb's root), ``drops`` and ``overlimits``.
    """
    found = {host.name: _sent(host.namespace, NIC) for host in topology.hosts}
    ports = [port(index) for index in range(topology.host_count)]
    return found | {name: _sent(topology.switch, name) for name in ports}


def _sent(namespace: str, dev: str) -> dict[str, int]:
    for qdisc in iproute.query("tc", ["-statistics", "qdisc", "show", "dev", dev], namespace):
        if qdisc["kind"] == "htb":
            return {name: qdisc[name] for name in ("bytes", "packets", "drops", "overlimits")}
    raise LabError(f"{dev} in {namespace} has no limiter", hint="build the lab anew")


def _link(namespace: str) -> dict[str, Any]:
    return {
        "links": iproute.query("ip", ["-details", "link", "show"], namespace),
        "qdiscs": iproute.query("tc", ["-statistics", "qdisc", "show"], namespace),
    }
