"""The classifier of a kernel or a process that may not use BPF: u32 filters on the DSCP. Pure.

u32 sees the packet and not its socket's priority, so here the DSCP alone decides, also for
packets that are forwarded. There is one filter for each lane and each of three protocols: IPv4,
IPv6, and frames with a VLAN tag, for which the kernel asks filters of 802.1Q (skb_protocol) while
offset 0 still is the IP header. Each looks at the first word of that header, version included.

At clsact egress they set skb->priority (tc-skbedit(8)) and let the packet go on to others'
filters. A kernel without skbedit takes them at the HTB itself, where they name the class.
"""

from __future__ import annotations

from dataclasses import dataclass

ETH_P_IP, ETH_P_IPV6, ETH_P_8021Q = 0x0800, 0x86DD, 0x8100  # <linux/if_ether.h>
# RFC 791 and RFC 8200: version in the first four bits, then (IPv4: after the header length) the
# byte whose upper six bits are the DSCP.
V4, V4_SHIFT, V4_MASK = 0x40000000, 18, 0xF0FC0000
V6, V6_SHIFT, V6_MASK = 0x60000000, 22, 0xFFC00000

# A filter's place says that it is ours: these prios, one a protocol, and these nodes.
FIRST_PRIO = 0x7150
PROTOCOLS = (ETH_P_IP, ETH_P_IPV6, ETH_P_8021Q)
# u32 has no name to say whether attach made the clsact (tlsched/tc/observed.py): the node does.
OWNER_NODE, GUEST_NODE = 0xA00, 0xB00


@dataclass(frozen=True, slots=True)
class Match:
    """One filter: packets whose first word of the IP header has ``value`` under ``mask``.

    ``protocol`` as in <linux/if_ether.h>; ``node`` is the lower part of the handle. It sets
    ``skb_priority``, or without that names the class ``classid``.
    """

    protocol: int
    prio: int
    node: int
    value: int
    mask: int
    skb_priority: int | None = None
    classid: int | None = None
