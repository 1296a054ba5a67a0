"""How long an urgent packet waits behind one that is being sent, and the rate it depends on."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.config import format_rate
from tlsched.doctor.finding import Finding
from tlsched.doctor.links import Link

LONG_GRAIN_US = 1000.0
WISHED_GRAIN_US = 250.0
LEAST_GSO_BYTES = 16384


def findings(link: Link, rate_bps: int | None, speed_bps: int | None) -> Iterator[Finding]:
    """The link's speed, and its preemption grain at ``rate_bps`` or else at its speed. Pure."""
    iface = link.iface
    if speed_bps is None:
        yield Finding("note", "the driver does not tell the link's speed", about=iface)
    else:
        yield Finding("ok", f"the link runs at {format_rate(speed_bps)}", about=iface)
    if rate_bps is not None and speed_bps is not None and rate_bps > speed_bps:
        what = f"the rate {format_rate(rate_bps)} is above the link's speed: the device queues"
        yield Finding("warning", what, f"attach with --rate {format_rate(speed_bps)}", iface)
    used_bps = (
        min(rate for rate in (rate_bps, speed_bps) if rate) if rate_bps or speed_bps else None
    )
    if used_bps is None:
        what = f"how long one packet of {link.gso_max_bytes} bytes takes depends on the rate"
        yield Finding("note", what, "give --rate", iface)
        return
    grain_us = link.gso_max_bytes * 8 / used_bps * 1e6
    what = (
        f"an urgent packet waits {grain_us:.0f} us at most for one that is being sent"
        f" (GSO {link.gso_max_bytes} bytes at {format_rate(used_bps)})"
    )
    if grain_us <= LONG_GRAIN_US:
        yield Finding("ok", what, about=iface)
        return
    size_bytes = max(LEAST_GSO_BYTES, int(used_bps / 8 * WISHED_GRAIN_US / 1e6))
    remedy = f"ip link set dev {iface} gso_max_size {size_bytes}"
    worth_it = size_bytes < link.gso_max_bytes
    yield Finding("note", what, remedy if worth_it else "", iface)
