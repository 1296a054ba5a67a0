"""The classifier of a kernel or a process that may not use BPF: u32 filters on the DSCP. Pure.

u32 sees the packet and not its socket's priority, so here the DSCP alone decides, also for
packets that are forwarded. There is one filter for each lane and each of three protocols: IPv4,
IPv6, and frames with a VLAN tag, for which the kernel asks filters of 802.1Q (skb_protocol) while
offset 0 still is the IP header. Each looks at the first word of that header, version included.

At clsact egress they set skb->priority (tc-skbedit(8)) and let the packet go on to others'
filters. A kernel without skbedit takes them at the HTB itself, where they name the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tlsched.bands import Band

ETH_P_IP, ETH_P_IPV6, ETH_P_8021Q = 0x0800, 0x86DD, 0x8100  # <linux/if_ether.h>
# RFC 791 and RFC 8200: version in the first four bits, then (IPv4: after the header length) the
# byte whose upper six bits are the DSCP.
V4, V4_SHIFT, V4_MASK = 0x40000000, 18, 0xF0FC0000
V6, V6_SHIFT, V6_MASK = 0x60000000, 22, 0xFFC00000

# A filter's place says that it is ours: these prios, one a protocol, and these nodes (the lower
# part of a u32 handle; the upper one is a hash table's, which the kernel numbers).
FIRST_PRIO = 0x7150
PROTOCOLS = (ETH_P_IP, ETH_P_IPV6, ETH_P_8021Q)
PRIOS = range(FIRST_PRIO, FIRST_PRIO + len(PROTOCOLS))
# u32 has no name to say whether attach made the clsact (tlsched/tc/observed.py): the node does.
OWNER_NODE, GUEST_NODE = 0xA00, 0xB00
NODE_MASK, NUMBER_MASK = 0xFFF, 0xFF


@dataclass(frozen=True, slots=True)
class Match:
    """One filter: packets whose first word of the IP header has ``value`` under ``mask``.

    ``protocol`` as in <linux/if_ether.h>; ``number`` tells those of one ``prio`` apart. It sets
    ``skb_priority``, or names the class ``classid``.
    """

    protocol: int
    prio: int
    number: int
    value: int
    mask: int
    skb_priority: int | None = None
    classid: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where filters are: all of a prio (``handle`` 0) or one."""

    prio: int
    protocol: int
    handle: int = 0


def matches(bands: Sequence[Band], *, at_htb: bool) -> tuple[Match, ...]:
    """The filters that lead the lanes of ``bands`` into their bands."""
    return tuple(_matches(bands, at_htb))


def lane_dscps(found: Iterable[Match]) -> list[int]:
    """The DSCPs that filters go by, in the order of the lanes."""
    ip = sorted((item for item in found if item.protocol == ETH_P_IP), key=lambda m: m.number)
    return [item.value >> V4_SHIFT & 0x3F for item in ip]


def _matches(bands: Sequence[Band], at_htb: bool) -> Iterator[Match]:
    versions = {
        ETH_P_IP: [(V4, V4_SHIFT, V4_MASK)],
        ETH_P_IPV6: [(V6, V6_SHIFT, V6_MASK)],
        ETH_P_8021Q: [(V4, V4_SHIFT, V4_MASK), (V6, V6_SHIFT, V6_MASK)],
    }
    lanes = [band for band in bands if band.dscp is not None]
    for prio, protocol in zip(PRIOS, PROTOCOLS, strict=True):
        each = [(version, band) for version in versions[protocol] for band in lanes]
        for number, ((version, shift, mask), band) in enumerate(each, start=1):
            assert band.dscp is not None
            value = version | band.dscp << shift
            chosen = (None, band.classid) if at_htb else (band.classid, None)
            yield Match(protocol, prio, number, value, mask, *chosen)
