"""Changes as rtnetlink messages, and messages as what kernel.py reads. No socket here.

The messages are built from pyroute2's classes but not by its ``tc()`` call: that one counts
bursts in whole microseconds, knows no bfifo, and moves a qdisc of a kind that it does not know
to the root. Kernel side: net/sched/sch_api.c, sch_htb.c, sch_fifo.c, cls_bpf.c.
"""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

from pyroute2.netlink import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NLM_F_REQUEST,
    nla,
)
from pyroute2.netlink.rtnl import (
    RTM_DELQDISC,
    RTM_DELTCLASS,
    RTM_DELTFILTER,
    RTM_NEWQDISC,
    RTM_NEWTCLASS,
    RTM_NEWTFILTER,
)
from pyroute2.netlink.rtnl.tcmsg import plugins, sched_bpf, tcmsg

from tlsched.errors import FeatureMissing
from tlsched.tc import changes as ch
from tlsched.tc.observed import CLSACT_PARENT, EGRESS, Filter, Qdisc, Stats
from tlsched.tc.tree import ROOT_KIND, ROOT_PARENT, HtbClass, Leaf

ADD = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
PUT = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
EDIT = NLM_F_REQUEST | NLM_F_ACK
DUMP = NLM_F_REQUEST | NLM_F_DUMP

CLSACT_HANDLE = 0xFFFF0000
TCA_INGRESS_BLOCK, TCA_EGRESS_BLOCK = 13, 14  # <linux/rtnetlink.h>
LINKLAYER_ETHERNET = 1  # TC_LINKLAYER_ETHERNET: exact lengths, no rate table needed
DIRECT_PACKETS = 1000  # HTB's own queue while the default class is missing (htb_init)
HTB_VERSION = 3
MAX_U32 = 2**32 - 1
ETH_P_ALL = 3
BPF_DIRECT_ACTION = 1  # TCA_BPF_FLAG_ACT_DIRECT


class _BfifoOptions(nla):  # type: ignore[misc]  # pyroute2 ships no types
    """struct tc_fifo_qopt, <linux/pkt_sched.h>."""

    fields = (("limit", "I"),)


class _BpfOptions(sched_bpf.options):  # type: ignore[misc]  # pyroute2 ships no types
    """A bpf filter's options, with the last three that pyroute2 leaves out."""

    nla_map = (
        *sched_bpf.options.nla_map,
        ("TCA_BPF_FLAGS_GEN", "uint32"),
        ("TCA_BPF_TAG", "cdata"),
        ("TCA_BPF_ID", "uint32"),
    )


def register_plugins() -> None:
    """Teach pyroute2 the queue kind it lacks, and to decode a filter's program id and tag."""
    plugins.setdefault("bfifo", SimpleNamespace(options=_BfifoOptions))
    plugins["bpf"] = SimpleNamespace(**{**vars(sched_bpf), "options": _BpfOptions})


def dump(kind_of: int, ifindex: int, parent: int = 0) -> tcmsg:
    """A request for all qdiscs, classes or filters of a link (RTM_GETQDISC and so on)."""
    return _message(kind_of, DUMP, ifindex, parent=parent)


def encode(change: ch.Change, ifindex: int, program_fd: int | None) -> list[tcmsg]:
    """The messages that apply ``change``. ``program_fd`` is what SetFilter attaches."""
    if isinstance(change, ch.SetFilter):
        clsact = (RTM_NEWQDISC, ADD, ifindex, CLSACT_HANDLE, CLSACT_PARENT, "clsact")
        first = [_message(*clsact)] if change.add_clsact else []
        return [*first, _set_filter(change, ifindex, program_fd)]
    if isinstance(change, ch.SetLeaf):
        old = _message(RTM_DELQDISC, EDIT, ifindex, change.new.handle, change.new.parent)
        return [*([old] if change.clear_first else []), _leaf(PUT, ifindex, change.new)]
    return [_encode_one(change, ifindex)]


def _encode_one(change: ch.Change, ifindex: int) -> tcmsg:
    match change:
        case ch.AddRoot():
            return _add_root(change, ifindex)
        case ch.DelRoot():
            return _message(RTM_DELQDISC, EDIT, ifindex, change.handle, ROOT_PARENT)
        case ch.AddClass(new=new):
            return _class(ADD, ifindex, new)
        case ch.ChangeClass(new=new):
            return _class(EDIT, ifindex, new)
        case ch.DelClass():
            return _message(RTM_DELTCLASS, EDIT, ifindex, change.classid)
        case ch.ChangeLeaf(new=leaf):
            return _leaf(EDIT, ifindex, leaf)
        case ch.DelClsact():
            return _message(RTM_DELQDISC, EDIT, ifindex, CLSACT_HANDLE, CLSACT_PARENT)
        case ch.DelFilter():
            info = _filter_info(change.prio)
            return _message(RTM_DELTFILTER, EDIT, ifindex, change.handle, EGRESS, "bpf", info=info)
    raise TypeError(f"{type(change).__name__} has no message")


def qdisc(message: tcmsg) -> Qdisc:
    """Decode a qdisc out of a dump."""
    options = message.get_attr("TCA_OPTIONS")
    kind = message.get_attr("TCA_KIND")
    init = options.get_attr("TCA_HTB_INIT") if kind == ROOT_KIND else None
    # pyroute2 does not know the attributes of blocks and gives their numbers only.
    unknown = {value["header"]["type"] for name, value in message["attrs"] if name == "UNKNOWN"}
    return Qdisc(
        kind=kind,
        handle=message["handle"],
        parent=message["parent"],
        limit_bytes=options["limit"] if kind == "bfifo" else None,
        default_minor=init["defcls"] if init else None,
        stats=stats(message),
        shares_ingress=TCA_INGRESS_BLOCK in unknown,
        shares_egress=TCA_EGRESS_BLOCK in unknown,
    )


def htb_class(message: tcmsg) -> HtbClass:
    """Decode an HTB class out of a dump."""
    options = message.get_attr("TCA_OPTIONS")
    parms = options.get_attr("TCA_HTB_PARMS")
    # The 32-bit fields stop at their maximum; the 64-bit attributes are there when they do.
    rate = options.get_attr("TCA_HTB_RATE64") or parms["rate"]
    ceil = options.get_attr("TCA_HTB_CEIL64") or parms["ceil"]
    classid, parent = message["handle"], message["parent"]
    return HtbClass(
        classid=classid,
        # A class right under the qdisc is reported as under "root" (htb_dump_class).
        parent=classid & 0xFFFF0000 if parent == ROOT_PARENT else parent,
        prio=parms["prio"],
        rate_bps=rate * 8,
        ceil_bps=ceil * 8,
        burst_ticks=parms["buffer"],
        cburst_ticks=parms["cbuffer"],
        quantum_bytes=parms["quantum"],
    )


def filter_(message: tcmsg, parent: int) -> Filter | None:
    """Decode a filter out of a dump; None for the chain heads that stand among them."""
    if not message["handle"]:
        return None
    kind, name, program_id, tag = message.get_attr("TCA_KIND"), None, None, None
    if kind == "bpf":
        options = message.get_attr("TCA_OPTIONS")
        name = options.get_attr("TCA_BPF_NAME")
        program_id = options.get_attr("TCA_BPF_ID")
        raw_tag = options.get_attr("TCA_BPF_TAG")
        tag = raw_tag.hex() if raw_tag else None
    return Filter(parent, kind, message["info"] >> 16, message["handle"], name, program_id, tag)


def stats(message: tcmsg) -> Stats:
    """Decode the counters of a qdisc or class (struct gnet_stats_basic, gnet_stats_queue)."""
    both = message.get_attr("TCA_STATS2")
    basic = both.get_attr("TCA_STATS_BASIC") if both else None
    queue = both.get_attr("TCA_STATS_QUEUE") if both else None
    if basic is None or queue is None:
        return Stats()
    return Stats(basic["packets"], basic["bytes"], queue["backlog"], queue["drops"])


def _message(
    kind_of: int,
    flags: int,
    ifindex: int,
    handle: int = 0,
    parent: int = 0,
    kind: str | None = None,
    options: dict[str, Any] | None = None,
    info: int = 0,
) -> tcmsg:
    message = tcmsg()
    message["header"]["type"] = kind_of
    message["header"]["flags"] = flags
    message["index"], message["handle"] = ifindex, handle
    message["parent"], message["info"] = parent, info
    if kind is not None:
        if kind not in plugins:
            raise FeatureMissing(
                f'pyroute2 does not know the kind "{kind}"', hint="use pyroute2 0.9.5 or later"
            )
        message["attrs"].append(("TCA_KIND", kind))
    if options is not None:
        message["attrs"].append(("TCA_OPTIONS", options))
    return message


def _add_root(change: ch.AddRoot, ifindex: int) -> tcmsg:
    init = {
        "version": HTB_VERSION,
        "rate2quantum": 10,  # unused: every class states its quantum
        "defcls": change.default_minor,
        "debug": 0,
        "direct_pkts": 0,
    }
    options = {"attrs": [("TCA_HTB_INIT", init), ("TCA_HTB_DIRECT_QLEN", DIRECT_PACKETS)]}
    flags = PUT if change.foreign else ADD
    return _message(RTM_NEWQDISC, flags, ifindex, change.handle, ROOT_PARENT, ROOT_KIND, options)


def _class(flags: int, ifindex: int, new: HtbClass) -> tcmsg:
    rate, ceil = new.rate_bps // 8, new.ceil_bps // 8
    parms = {
        "rate": min(rate, MAX_U32),
        "ceil": min(ceil, MAX_U32),
        "rate___reserved": LINKLAYER_ETHERNET,
        "ceil___reserved": LINKLAYER_ETHERNET,
        "buffer": new.burst_ticks,
        "cbuffer": new.cburst_ticks,
        "quantum": new.quantum_bytes,
        "prio": new.prio,
    }
    attrs: list[tuple[str, Any]] = [("TCA_HTB_PARMS", parms)]
    if rate > MAX_U32:
        attrs.append(("TCA_HTB_RATE64", rate))
    if ceil > MAX_U32:
        attrs.append(("TCA_HTB_CEIL64", ceil))
    options = {"attrs": attrs}
    return _message(RTM_NEWTCLASS, flags, ifindex, new.classid, new.parent, ROOT_KIND, options)


def _leaf(flags: int, ifindex: int, leaf: Leaf) -> tcmsg:
    options = {"limit": leaf.limit_bytes}
    return _message(RTM_NEWQDISC, flags, ifindex, leaf.handle, leaf.parent, leaf.kind, options)


def _set_filter(change: ch.SetFilter, ifindex: int, program_fd: int | None) -> tcmsg:
    if program_fd is None:
        raise ValueError("a filter cannot be set without a program")
    attrs = [
        ("TCA_BPF_FD", program_fd),
        ("TCA_BPF_NAME", change.name),
        ("TCA_BPF_FLAGS", BPF_DIRECT_ACTION),
    ]
    flags = ADD if change.replaces_program is None else PUT
    return _message(
        RTM_NEWTFILTER,
        flags,
        ifindex,
        change.handle,
        EGRESS,
        "bpf",
        {"attrs": attrs},
        _filter_info(change.prio),
    )


def _filter_info(prio: int) -> int:
    return prio << 16 | socket.htons(ETH_P_ALL)
