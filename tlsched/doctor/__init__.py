"""Whether attach can do its work here, and what would spoil it: findings, each with its remedy.

Nothing is changed: what is tried, is tried in a namespace of its own or as a dry run, and what may
not be looked at is said. One file for each thing that is looked at.
"""

from __future__ import annotations

from tlsched import linkstatus
from tlsched.bands import DEFAULT_DSCPS
from tlsched.config import check_iface
from tlsched.doctor import (
    attached,
    cgroups,
    classifier,
    dcb,
    features,
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
from tlsched.errors import InterfaceMissing, PermissionMissing
from tlsched.linkstatus import LinkStatus
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
        *features.findings(),
        *classifier.findings(),
        *cgroups.findings(),
    ]
    can_attach = not any(finding.level == "blocker" for finding in found)
    with Kernel() as kernel, sysfs.of_this_namespace() as files:
        for link in links:
            try:
                found += _about(link, kernel, files, rate_bps, can_attach)
            except InterfaceMissing:
                if iface is not None:  # else it went since it was listed
                    raise
    return found


def _chosen(iface: str | None) -> list[Link]:
    if iface is None:
        return [link for link in read_links() if link.is_physical]
    check_iface(iface)
    ifindex = interface_index(iface)
    return [link for link in read_links() if link.ifindex == ifindex]


def _about(
    link: Link, kernel: Kernel, files: sysfs.Sysfs | None, rate_bps: int | None, can_attach: bool
) -> list[Finding]:
    device = kernel.device(link.ifindex)
    now = _status(link)
    used_bps = rate_bps or (now.rate_bps if now else None)
    dscps = [band.dscp for band in now.bands if band.dscp is not None] if now else []
    found = [
        *placement.findings(link),
        *managers.findings(link),
        *programs.findings(link, kernel.read(link.iface)),
        *queues.findings(link, device.tx_queues, files),
        *attached.findings(now),
        *grain.findings(link, used_bps, device.speed_bps),
        *dcb.findings(link, dscps or DEFAULT_DSCPS),
    ]
    if can_attach:
        found += rehearsal.findings(link.iface, used_bps)
    return found


def _status(link: Link) -> LinkStatus | None:
    """The link's state; None where it is attached and its counters may not be read."""
    try:
        (status,) = linkstatus.status(link.iface)
    except PermissionMissing:
        return None
    return status
