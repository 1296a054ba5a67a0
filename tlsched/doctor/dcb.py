"""Whether the device sorts by DSCP too: its DCB application table, where its driver has one.

A card that maps a DSCP to a priority gives the lanes hardware queues and pause frames of their own,
which NCCL over RoCE needs (docs/nccl.md). Source: IEEE 802.1Qaz, <linux/dcbnl.h>,
net/dcb/dcbnl.c (dcbnl_ieee_fill).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from tlsched.bands import DEFAULT_DSCPS
from tlsched.doctor.finding import Finding
from tlsched.doctor.links import NETLINK_ROUTE, Link
from tlsched.netlink import ask, attribute, attributes

RTM_GETDCB, DCB_CMD_IEEE_GET = 78, 21
_IFNAME, _IEEE, _APP_TABLE, _APP, _TRUST_TABLE = 1, 13, 3, 1, 11  # DCB_ATTR_…
SELECTOR_DSCP = 5  # IEEE_8021QAZ_APP_SEL_DSCP
_DCBMSG = struct.Struct("=BBH")
_APP_ENTRY = struct.Struct("=BBH")  # struct dcb_app: selector, priority, protocol


def findings(link: Link, dscps: Sequence[int] = DEFAULT_DSCPS) -> Iterator[Finding]:
    """What the driver tells; it is not needed for TCP."""
    name = attribute(_IFNAME, link.iface.encode() + b"\0")
    request = _DCBMSG.pack(0, DCB_CMD_IEEE_GET, 0) + name
    try:
        answers = list(ask(NETLINK_ROUTE, RTM_GETDCB, request))
    except OSError:  # EOPNOTSUPP: no DCB in the kernel or the driver
        what = "the driver does not tell whether the device sorts by DSCP (no DCB)"
        yield Finding("note", what, about=link.iface)
        return
    yield judge(link.iface, dscps, b"".join(answers)[_DCBMSG.size :])


def judge(iface: str, dscps: Sequence[int], answer: bytes) -> Finding:
    """The finding for the attributes of the driver's answer. Pure."""
    ieee = dict(attributes(dict(attributes(answer)).get(_IEEE, b"")))
    trusted = [value[0] for _, value in attributes(ieee.get(_TRUST_TABLE, b"")) if value]
    entries = [
        _APP_ENTRY.unpack(value[: _APP_ENTRY.size])
        for kind, value in attributes(ieee.get(_APP_TABLE, b""))
        if kind == _APP
    ]
    priorities = {
        protocol: prio for selector, prio, protocol in entries if selector == SELECTOR_DSCP
    }
    if trusted and SELECTOR_DSCP not in trusted:
        what = "the device is told to sort by PCP and not by DSCP"
        return Finding("note", what, f"dcb apptrust set dev {iface} order dscp", iface)
    mapped = [f"{dscp}:{priorities[dscp]}" for dscp in dscps if dscp in priorities]
    if mapped:
        what = f"the device sorts the lanes' DSCPs into priorities ({' '.join(mapped)})"
        return Finding("ok", what, about=iface)
    what = "the device has no priority for the lanes' DSCPs, which only RoCE needs"
    example = " ".join(f"{dscp}:{6 - lane}" for lane, dscp in enumerate(dscps))
    return Finding("note", what, f"dcb app replace dev {iface} dscp-prio {example}", iface)
