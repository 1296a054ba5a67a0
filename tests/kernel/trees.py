"""The trees of tlsched for tests: on which device, with which settings, under which kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.netns import Namespace
from tlsched.tc.probe import KernelFeatures, probe

DEV = "eth0"


@dataclass(frozen=True)
class Kind:
    """A tree: its root's kind, what it needs, settings that make it, others that change it."""

    root: str
    needs: tuple[str, ...] = ()
    tx_queues: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "htb": Kind("htb", settings={"rate": "1gbit"}, other={"rate": "2gbit"}),
    "ets": Kind(
        "ets",
        ("ets",),
        settings={"rate": None, "qdisc": "ets"},
        other={"rate": None, "qdisc": "ets", "default_share": 0.2},
    ),
    "prio": Kind(
        "prio",
        ("prio",),
        settings={"rate": None, "default_share": 0.0},
        other={"rate": None, "default_share": 0.0, "dscps": (46, 32, 24, 16, 12, 8)},
    ),
    "mq of ets": Kind(
        "mq",
        ("ets",),
        4,
        settings={"rate": None},
        other={"rate": None, "default_share": 0.5},
    ),
    "mq of prio": Kind(
        "mq",
        ("prio",),
        2,
        settings={"rate": None, "qdisc": "prio"},
        other={"rate": None, "qdisc": "prio", "dscps": (46, 32, 24, 16, 12, 8)},
    ),
}


@functools.cache
def features() -> KernelFeatures:
    """What the running kernel has."""
    return probe()


def need(*kinds: str) -> None:
    """Skip the test on a kernel that lacks one of ``kinds``."""
    for kind in kinds:
        if not getattr(features(), kind):
            pytest.skip(f"kernel lacks {kind}")


def link_for(kind: Kind, make: Callable[[], Namespace]) -> tuple[Namespace, Namespace]:
    """Two namespaces joined by a veth called DEV whose first end has the queues of ``kind``."""
    need(*kind.needs)
    a, b = make(), make()
    queues = ["numtxqueues", str(kind.tx_queues), "numrxqueues", str(kind.tx_queues)]
    veth = ["type", "veth", "peer", "name", DEV, "netns", b.name, *queues]
    a.run("ip", "link", "add", DEV, *queues, *veth)
    for number, end in enumerate((a, b), start=1):
        end.run("ip", "link", "set", DEV, "addrgenmode", "none")
        end.run("ip", "address", "add", f"10.99.0.{number}/24", "dev", DEV)
        end.run("ip", "link", "set", DEV, "up")
    return a, b
