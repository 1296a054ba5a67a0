"""The device's own transmit queues: how many, and how much waits in them behind the qdisc."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.doctor.finding import Finding
from tlsched.doctor.links import Link
from tlsched.doctor.sysfs import Sysfs


def findings(link: Link, in_use: int, sysfs: Sysfs | None) -> Iterator[Finding]:
    """Number of queues, and whether the driver keeps them short (byte queue limits)."""
    if in_use > 1:
        what = f"{in_use} transmit queues: with --rate one qdisc, and one lock, serves them all"
        yield Finding("note", what, "at more than some 10 Gbit/s attach without --rate", link.iface)
    if not link.is_physical:
        return  # a packet goes through a veth at once: there is no queue to keep short
    if sysfs is None:
        what = "byte queue limits could not be looked at: /sys shows another network namespace"
        yield Finding("note", what, "run as root", link.iface)
        return
    queues = f"class/net/{link.iface}/queues"
    names = [name for name in sysfs.names(queues) if name.startswith("tx-")]
    limits = [sysfs.text(f"{queues}/{name}/byte_queue_limits/limit") for name in names]
    sent = sysfs.text(f"class/net/{link.iface}/statistics/tx_packets") or "0"
    yield bql_finding(link.iface, [limit for limit in limits if limit], int(sent))


def bql_finding(iface: str, limits: list[str], sent_packets: int) -> Finding:
    """Whether byte queue limits are at work, from each queue's limit in bytes. Pure.

    A driver that reports no completions leaves the limit at 0 (lib/dynamic_queue_limits.c).
    """
    working = [int(limit) for limit in limits if limit != "0"]
    if working:
        what = f"byte queue limits keep the device's queue short ({max(working)} bytes at most)"
        return Finding("ok", what, about=iface)
    if limits and not sent_packets:
        return Finding("note", "no packet was sent yet: byte queue limits unknown", about=iface)
    what = "no byte queue limits: packets queue up in the device, where no lane overtakes"
    return Finding("warning", what, "attach with a --rate a little below the link's speed", iface)
