"""Whether the interface is where packets leave the host."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.doctor.finding import Finding
from tlsched.doctor.links import Link


def findings(link: Link) -> Iterator[Finding]:
    """Whether it is up, and whether another interface below it is the better place. Pure."""
    if not link.is_up:
        remedy = f"ip link set dev {link.iface} up"
        yield Finding("note", "it is down, and sends nothing", remedy, link.iface)
    if link.lower is not None:
        what = f"a {link.kind} on top of {link.lower}, which may send for others too"
        remedy = f"attach to {link.lower} and not to both"
        yield Finding("warning", what, remedy, link.iface)
