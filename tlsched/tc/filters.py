"""Filters as rtnetlink messages: the classifier at clsact egress, and u32's matches.

Kernel side: net/sched/cls_bpf.c, cls_u32.c, act_skbedit.c.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from pyroute2.netlink.rtnl import RTM_DELTFILTER, RTM_NEWTFILTER
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tlsched.tc import changes as ch
from tlsched.tc.observed import EGRESS
from tlsched.tc.plugins import ActionMessage
from tlsched.tc.u32 import Match, Place
from tlsched.tc.wire import ADD, EDIT, PUT, message

ETH_P_ALL = 3  # <linux/if_ether.h>
ACT_UNSPEC = -1  # TC_ACT_UNSPEC: the next filter is asked as well, <linux/pkt_cls.h>
RTM_NEWACTION = 48  # <linux/rtnetlink.h>
U32_TERMINAL = 1  # TC_U32_TERMINAL
SELECTOR_BYTES = 32
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


def set_u32(match: Match, ifindex: int, parent: int, first_node: int) -> tcmsg:
    """What adds one u32 filter at ``parent``, as a node of the prio's own hash table."""
    attrs: list[tuple[str, Any]] = []
    if match.classid is not None:
        attrs.append(("TCA_U32_CLASSID", match.classid))
    if match.skb_priority is not None:
        attrs.append(("TCA_U32_ACT", {"attrs": [("TCA_ACT_PRIO_1", _skbedit(match.skb_priority))]}))
    attrs.append(("TCA_U32_SEL", pack_selector(match.value, match.mask)))
    info = info_of(match.prio, match.protocol)
    options = {"attrs": attrs}
    node = first_node + match.number
    return message(RTM_NEWTFILTER, ADD, ifindex, node, parent, "u32", options, info)


def del_u32(place: Place, ifindex: int, parent: int) -> tcmsg:
    """What deletes one u32 filter, or all of a prio."""
    info = info_of(place.prio, place.protocol)
    return message(RTM_DELTFILTER, EDIT, ifindex, place.handle, parent, "u32", info=info)


def pack_selector(value: int, mask: int) -> bytes:
    """struct tc_u32_sel with one key on the first word of the header, <linux/pkt_cls.h>."""
    head = struct.pack("=BBBxHHhhI", U32_TERMINAL, 0, 1, 0, 0, 0, 0, 0)
    return head + struct.pack("!II", mask, value) + struct.pack("=ii", 0, 0)


def unpack_selector(selector: bytes) -> tuple[int, int] | None:
    """Value and mask of what :func:`pack_selector` made; None for any other selector."""
    if len(selector) != SELECTOR_BYTES:
        return None
    mask, value = struct.unpack_from("!II", selector, SELECTOR_BYTES - 16)
    return (value, mask) if selector == pack_selector(value, mask) else None


def trial_action(kind: str) -> ActionMessage:
    """What asks the kernel whether it has an action: one without its options, which is refused."""
    asked = ActionMessage()
    asked["header"]["type"], asked["header"]["flags"] = RTM_NEWACTION, ADD
    act = {"attrs": [("TCA_ACT_KIND", kind)]}
    asked["attrs"].append(("TCA_ROOT_TAB", {"attrs": [("TCA_ACT_PRIO_1", act)]}))
    return asked


def _skbedit(skb_priority: int) -> dict[str, Any]:
    edit = [
        ("TCA_SKBEDIT_PARMS", {"action": ACT_UNSPEC}),
        ("TCA_SKBEDIT_PRIORITY", skb_priority),
    ]
    return {"attrs": [("TCA_ACT_KIND", "skbedit"), ("TCA_ACT_OPTIONS", {"attrs": edit})]}


def info_of(prio: int, protocol: int = ETH_P_ALL) -> int:
    """tcm_info of a filter: its prio and the protocol of the packets that it is asked about."""
    return prio << 16 | socket.htons(protocol)
