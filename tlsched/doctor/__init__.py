"""Whether attach can do its work here, and what would spoil it: findings, each with its remedy.

Nothing is changed: what is tried, is tried in a namespace of its own or as a dry run, and what may
not be looked at is said. One file for each thing that is looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tlsched import linkstatus
from tlsched.config import check_iface
from tlsched.doctor import (
    cgroups,
    classifier,
    dcb,
    grain,
    managers,
    placement,
    privileges,
    programs,
    queues,
    rehearsal,
    sysfs,
)
from tlsched.doctor.finding import Finding
from tlsched.doctor.links import Link, read_links
from tlsched.errors import HostError, InterfaceMissing
from tlsched.tc.kernel import Kernel, interface_index

__all__ = ["Finding", "examine"]


def examine(iface: str | None = None, rate_bps: int | None = None) -> list[Finding]:
    """Findings about the host, then about ``iface`` or every interface that looks physical.

    ``rate_bps`` is what attach is to be given, in bit/s; without it what the link is attached
    with, or its speed. Raises ConfigError or InterfaceMissing for a name that is none.
    """
    links = _chosen(iface)
    found = [
        *privileges.findings(),
        *classifier.findings(),
        *cgroups.findings(),
    ]
    can_attach = not any(finding.level == "blocker" for finding in found)
    with Kernel() as kernel, sysfs.of_this_namespace() as files:
        for link in links:
            with contextlib.suppress(InterfaceMissing):  # gone since it was listed
                found += _about(link, _Means(kernel, files), rate_bps)
                if can_attach:
                    found.append(rehearsal.finding(link.iface, rate_bps or _attached_rate(link)))
    return found


@dataclass(frozen=True, slots=True)
class _Means:
    """What links are looked at with."""

    kernel: Kernel
    sysfs: sysfs.Sysfs | None


def _chosen(iface: str | None) -> list[Link]:
    if iface is None:
        return [link for link in read_links() if link.is_physical]
    check_iface(iface)
    ifindex = interface_index(iface)
    return [link for link in read_links() if link.ifindex == ifindex]


def _about(link: Link, means: _Means, rate_bps: int | None) -> Iterator[Finding]:
    observed = means.kernel.read(link.iface)
    yield from placement.findings(link)
    yield from managers.findings(link)
    yield from programs.findings(link, observed)
    yield from queues.findings(link, means.sysfs)
    yield from grain.findings(link, rate_bps or _attached_rate(link), _speed_bps(link, means.sysfs))
    yield from dcb.findings(link)


def _attached_rate(link: Link) -> int | None:
    try:
        (status,) = linkstatus.status(link.iface)
    except HostError:  # its counters may not be read
        return None
    return status.rate_bps


def _speed_bps(link: Link, files: sysfs.Sysfs | None) -> int | None:
    """Its speed; what devices made in software say (a veth 10 Gbit/s) is nobody's."""
    text = files.text(f"class/net/{link.iface}/speed") if files and link.is_physical else None
    return int(text) * 1_000_000 if text and int(text) > 0 else None
