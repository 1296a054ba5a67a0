"""Filters as rtnetlink messages: the classifier at clsact egress, and u32's matches.

Kernel side: net/sched/cls_bpf.c, cls_u32.c, act_skbedit.c.
"""

from __future__ import annotations

import socket
from typing import Any

from pyroute2.netlink.rtnl import RTM_NEWTFILTER
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tlsched.tc import changes as ch
from tlsched.tc.observed import EGRESS
from tlsched.tc.u32 import Match
from tlsched.tc.wire import ADD, PUT, message

ETH_P_ALL = 3  # <linux/if_ether.h>
ACT_UNSPEC = -1  # TC_ACT_UNSPEC: the next filter is asked as well, <linux/pkt_cls.h>
BPF_DIRECT_ACTION = 1  # TCA_BPF_FLAG_ACT_DIRECT


def set_bpf(change: ch.SetFilter, ifindex: int, program_fd: int | None) -> tcmsg:
    """What puts the loaded program ``program_fd`` at clsact egress."""
    if program_fd is None:
        raise ValueError("a filter cannot be set without a program")
    attrs = [
        ("TCA_BPF_FD", program_fd),
        ("TCA_BPF_NAME", change.name),
        ("TCA_BPF_FLAGS", BPF_DIRECT_ACTION),
    ]
    flags = ADD if change.replaces_program is None else PUT
    return message(
        RTM_NEWTFILTER,
        flags,
        ifindex,
        change.handle,
        EGRESS,
        "bpf",
        {"attrs": attrs},
        info_of(change.prio),
    )


def set_u32(match: Match, ifindex: int, parent: int) -> tcmsg:
    """What adds one u32 filter at ``parent``."""
    attrs: list[tuple[str, Any]] = []
    if match.classid is not None:
        attrs.append(("TCA_U32_CLASSID", match.classid))
    if match.skb_priority is not None:
        attrs.append(("TCA_U32_ACT", {"attrs": [("TCA_ACT_PRIO_1", _skbedit(match.skb_priority))]}))
    attrs.append(("TCA_U32_SEL", {"keys": [f"{match.value:#010x}/{match.mask:#010x}+0"]}))
    info = info_of(match.prio, match.protocol)
    options = {"attrs": attrs}
    return message(RTM_NEWTFILTER, ADD, ifindex, match.node, parent, "u32", options, info)


def _skbedit(skb_priority: int) -> dict[str, Any]:
    edit = [
        ("TCA_SKBEDIT_PARMS", {"action": ACT_UNSPEC}),
        ("TCA_SKBEDIT_PRIORITY", skb_priority),
    ]
    return {"attrs": [("TCA_ACT_KIND", "skbedit"), ("TCA_ACT_OPTIONS", {"attrs": edit})]}


def info_of(prio: int, protocol: int = ETH_P_ALL) -> int:
    """tcm_info of a filter: its prio and the protocol of the packets that it is asked about."""
    return prio << 16 | socket.htons(protocol)
