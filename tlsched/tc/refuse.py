"""What attach refuses before anything is written: devices and things of somebody else's. Pure."""

from __future__ import annotations

from tlsched.errors import ForeignQdisc, HostError
from tlsched.tc.changes import show
from tlsched.tc.device import AGGREGATES, Device
from tlsched.tc.observed import Observed


def refuse_device(device: Device) -> None:
    """Raise HostError for a device on which a tree would order nothing."""
    if device.is_loopback:
        raise HostError(
            f"{device.iface} is the loopback device: nothing on it leaves the host",
            hint="attach to the interface that leads to the other hosts",
        )
    if device.kind in AGGREGATES:
        slaves = ", ".join(device.slaves) or "it has none yet"
        raise HostError(
            f"{device.iface} is a {device.kind}: packets wait at its slaves and not here",
            hint=f"attach to each of its slaves: {slaves}",
        )


def refuse_foreign(before: Observed, replace_root: bool) -> None:
    """Raise ForeignQdisc when something of somebody else's is where ours would go."""
    iface, root, ingress = before.iface, before.root, before.foreign_ingress
    if root is not None and before.has_foreign_root and not replace_root:
        raise ForeignQdisc(
            f"{iface} has a root qdisc of somebody else's ({root.kind} {show(root.handle)})",
            hint="--replace-root replaces it; detach then leaves the kernel's default",
        )
    if ingress is not None:
        raise ForeignQdisc(
            f"{iface} has a qdisc of somebody else's ({ingress.kind} {show(ingress.handle)})"
            " in the place of clsact, which the classifier needs",
            hint="move its filters to a clsact qdisc, which has an ingress hook as well",
        )
    if before.clsact is not None and before.clsact.shares_egress:
        raise ForeignQdisc(
            f"{iface} has a clsact qdisc whose egress filters are a block shared with other links",
            hint="make it again without egress_block",
        )
    theirs = before.foreign_classifier
    if theirs is not None:
        what = theirs.kind if theirs.name is None else f"{theirs.kind} {theirs.name}"
        raise ForeignQdisc(
            f"{iface} has a filter of somebody else's ({what}) at clsact egress,"
            f" prio {theirs.prio}, where the classifier goes",
            hint="give that filter another prio",
        )
