"""rtnetlink messages as what kernel.py reads: qdiscs, classes, filters. No socket here."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tlsched.tc.filters import unpack_selector
from tlsched.tc.observed import Filter, Qdisc, Stats
from tlsched.tc.options import Bfifo, Ets, Htb, Mq, Mqprio, Options, Prio
from tlsched.tc.tree import ROOT_PARENT, HtbClass
from tlsched.tc.u32 import NUMBER_MASK, Match

TCA_INGRESS_BLOCK, TCA_EGRESS_BLOCK = 13, 14  # <linux/rtnetlink.h>


def qdisc(message: tcmsg) -> Qdisc:
    """Decode a qdisc out of a dump."""
    # pyroute2 does not know the attributes of blocks and gives their numbers only.
    unknown = {value["header"]["type"] for name, value in message["attrs"] if name == "UNKNOWN"}
    kind = message.get_attr("TCA_KIND")
    return Qdisc(
        kind=kind,
        handle=message["handle"],
        parent=message["parent"],
        options=_options(kind, message.get_attr("TCA_OPTIONS")),
        stats=stats(message),
        shares_ingress=TCA_INGRESS_BLOCK in unknown,
        shares_egress=TCA_EGRESS_BLOCK in unknown,
    )


def _options(kind: str, options: Any) -> Options | None:
    match kind:
        case Htb.kind:
            return Htb(options.get_attr("TCA_HTB_INIT")["defcls"])
        case Bfifo.kind:
            return Bfifo(options["limit"])
        case Prio.kind:
            return Prio(options["bands"], tuple(options["priomap"]))
        case Ets.kind:
            return _ets(options)
        case Mqprio.kind:
            return _mqprio(options)
        case Mq.kind:
            return Mq()
    return None


def _ets(options: Any) -> Ets:
    strict = options.get_attr("TCA_ETS_NSTRICT") or 0
    shared = options.get_attr("TCA_ETS_QUANTA")  # none without a band that shares
    quanta = () if shared is None else tuple(shared.get_attrs("TCA_ETS_QUANTA_BAND"))
    priomap = tuple(options.get_attr("TCA_ETS_PRIOMAP").get_attrs("TCA_ETS_PRIOMAP_BAND"))
    return Ets(strict, (0,) * strict + quanta, priomap)


def _mqprio(options: Any) -> Mqprio:
    classes = range(options["num_tc"])
    queues = tuple((options["count"][number], options["offset"][number]) for number in classes)
    return Mqprio(tuple(options["prio_tc_map"]), queues, options["hw"])


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
    info, options = message["info"], message.get_attr("TCA_OPTIONS")
    found = Filter(
        parent,
        kind=message.get_attr("TCA_KIND"),
        prio=info >> 16,
        handle=message["handle"],
        protocol=socket.ntohs(info & 0xFFFF),
    )
    if found.kind == "bpf":
        raw_tag = options.get_attr("TCA_BPF_TAG")
        return replace(
            found,
            name=options.get_attr("TCA_BPF_NAME"),
            program_id=options.get_attr("TCA_BPF_ID"),
            tag=raw_tag.hex() if raw_tag else None,
        )
    if found.kind == "u32" and found.is_ours and not found.is_table:
        return replace(found, match=_match(found, options))
    return found


def _match(found: Filter, options: Any) -> Match | None:
    """What one of our u32 filters matches; None when it was made otherwise."""
    sel, acts = options.get_attr("TCA_U32_SEL"), options.get_attr("TCA_U32_ACT")
    selected = None if sel is None else unpack_selector(bytes(sel))
    if selected is None:
        return None
    value, mask = selected
    skb_priority = None
    if acts is not None:
        act = acts.get_attr("TCA_ACT_PRIO_1")
        if act is None or act.get_attr("TCA_ACT_KIND") != "skbedit":
            return None
        skb_priority = act.get_attr("TCA_ACT_OPTIONS").get_attr("TCA_SKBEDIT_PRIORITY")
    return Match(
        found.protocol,
        found.prio,
        found.handle & NUMBER_MASK,
        value,
        mask,
        skb_priority,
        options.get_attr("TCA_U32_CLASSID"),
    )


def stats(message: tcmsg) -> Stats:
    """Decode the counters of a qdisc or class (struct gnet_stats_basic, gnet_stats_queue)."""
    both = message.get_attr("TCA_STATS2")
    basic = both.get_attr("TCA_STATS_BASIC") if both else None
    queue = both.get_attr("TCA_STATS_QUEUE") if both else None
    if basic is None or queue is None:
        return Stats()
    return Stats(basic["packets"], basic["bytes"], queue["backlog"], queue["drops"])
