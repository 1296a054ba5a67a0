"""Changes as rtnetlink messages. No socket here; the way back is in decode.py.

The messages are built from pyroute2's classes but not by its ``tc()`` call: that one counts
bursts in whole microseconds, knows no bfifo, and moves a qdisc of a kind that it does not know
to the root. Kernel side: net/sched/sch_api.c, sch_htb.c, sch_fifo.c, sch_ets.c, cls_bpf.c.
"""

from __future__ import annotations

from typing import Any

from pyroute2.netlink import nlmsg
from pyroute2.netlink.rtnl import (
    RTM_DELQDISC,
    RTM_DELTCLASS,
    RTM_DELTFILTER,
    RTM_NEWQDISC,
    RTM_NEWTCLASS,
    RTM_NEWTFILTER,
)
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tlsched.bands import ROOT_HANDLE
from tlsched.tc import changes as ch
from tlsched.tc import filters
from tlsched.tc.observed import CLSACT_PARENT, EGRESS
from tlsched.tc.options import Bfifo, Ets, Htb, Mq, Mqprio, Options, Prio
from tlsched.tc.tree import ROOT_PARENT, HtbClass, Queue
from tlsched.tc.wire import ADD, DUMP, EDIT, PUT, message

CLSACT_HANDLE = 0xFFFF0000
LINKLAYER_ETHERNET = 1  # TC_LINKLAYER_ETHERNET: exact lengths, no rate table needed
DIRECT_PACKETS = 1000  # HTB's own queue while the default class is missing (htb_init)
LOOPBACK = 1  # LOOPBACK_IFINDEX in every network namespace
TRIAL_PRIO = {"bpf": 1, "u32": 2}
QOPT_QUEUES = 16  # TC_QOPT_MAX_QUEUE, <linux/pkt_sched.h>
_HTB_INIT = {
    "version": 3,
    "rate2quantum": 10,  # unused: every class states its quantum
    "debug": 0,
    "direct_pkts": 0,
}
MAX_U32 = 2**32 - 1


def dump(kind_of: int, ifindex: int, parent: int = 0) -> tcmsg:
    """A request for all qdiscs, classes or filters of a link (RTM_GETQDISC and so on)."""
    return message(kind_of, DUMP, ifindex, parent=parent)


def trial(kind: str) -> list[nlmsg]:
    """What asks the kernel whether it has a kind, on the loopback device (see probe.py)."""
    match kind:
        case "clsact":
            return [message(RTM_NEWQDISC, PUT, LOOPBACK, CLSACT_HANDLE, CLSACT_PARENT, kind)]
        case "skbedit":
            return [filters.trial_action(kind)]
        case "bpf" | "u32":
            info = filters.info_of(TRIAL_PRIO[kind])
            return [message(RTM_NEWTFILTER, ADD, LOOPBACK, 0, EGRESS, kind, info=info)]
    return [message(RTM_NEWQDISC, PUT, LOOPBACK, ROOT_HANDLE, ROOT_PARENT, kind)]


def encode(change: ch.Change, ifindex: int, program_fd: int | None) -> list[tcmsg]:
    """The messages that apply ``change``. ``program_fd`` is what SetFilter attaches."""
    if isinstance(change, ch.SetFilter | ch.SetU32):
        clsact = (RTM_NEWQDISC, ADD, ifindex, CLSACT_HANDLE, CLSACT_PARENT, "clsact")
        first = [message(*clsact)] if change.add_clsact else []
        if isinstance(change, ch.SetFilter):
            return [*first, filters.set_bpf(change, ifindex, program_fd)]
        first += [filters.del_u32(place, ifindex, change.parent) for place in change.clears]
        at = (ifindex, change.parent, change.first_node)
        return [*first, *(filters.set_u32(match, *at) for match in change.matches)]
    if isinstance(change, ch.DelU32):
        return [filters.del_u32(place, ifindex, change.parent) for place in change.clears]
    if isinstance(change, ch.SetQueue):
        old = message(RTM_DELQDISC, EDIT, ifindex, change.new.handle, change.new.parent)
        return [*([old] if change.clear_first else []), _queue(PUT, ifindex, change.new)]
    return [_encode_one(change, ifindex)]


def _encode_one(change: ch.Change, ifindex: int) -> tcmsg:
    match change:
        case ch.AddRoot():
            root = Queue(change.handle, ROOT_PARENT, change.options)
            return _queue(PUT if change.foreign else ADD, ifindex, root)
        case ch.DelRoot():
            return message(RTM_DELQDISC, EDIT, ifindex, change.handle, ROOT_PARENT)
        case ch.AddClass(new=new):
            return _class(ADD, ifindex, new)
        case ch.ChangeClass(new=new):
            return _class(EDIT, ifindex, new)
        case ch.DelClass():
            return message(RTM_DELTCLASS, EDIT, ifindex, change.classid)
        case ch.ChangeQueue(new=queue):
            return _queue(EDIT, ifindex, queue)
        case ch.DelClsact():
            return message(RTM_DELQDISC, EDIT, ifindex, CLSACT_HANDLE, CLSACT_PARENT)
        case ch.DelFilter():
            info = filters.info_of(change.prio)
            return message(RTM_DELTFILTER, EDIT, ifindex, change.handle, EGRESS, "bpf", info=info)
    raise TypeError(f"{type(change).__name__} has no message")


def _queue(flags: int, ifindex: int, new: Queue) -> tcmsg:
    options = _options(new.options)
    return message(RTM_NEWQDISC, flags, ifindex, new.handle, new.parent, new.options.kind, options)


def _options(options: Options) -> dict[str, Any] | None:
    match options:
        case Htb(default_minor=minor):
            return {
                "attrs": [
                    ("TCA_HTB_INIT", {**_HTB_INIT, "defcls": minor}),
                    ("TCA_HTB_DIRECT_QLEN", DIRECT_PACKETS),
                ]
            }
        case Bfifo(limit_bytes=limit):
            return {"limit": limit}
        case Prio():
            return {"bands": options.bands, "priomap": options.priomap}
        case Ets():
            return {"attrs": _ets(options)}
        case Mqprio():
            return _mqprio(options)
        case Mq():
            return None


def _ets(options: Ets) -> list[tuple[str, Any]]:
    shared = [("TCA_ETS_QUANTA_BAND", quantum) for quantum in options.quanta[options.strict :]]
    mapped = [("TCA_ETS_PRIOMAP_BAND", band) for band in options.priomap]
    attrs: list[tuple[str, Any]] = [("TCA_ETS_NBANDS", options.bands)]
    if options.strict:
        attrs.append(("TCA_ETS_NSTRICT", options.strict))
    if shared:
        attrs.append(("TCA_ETS_QUANTA", {"attrs": shared}))
    return [*attrs, ("TCA_ETS_PRIOMAP", {"attrs": mapped})]


def _mqprio(options: Mqprio) -> dict[str, Any]:
    unused = [0] * (QOPT_QUEUES - options.traffic_classes)
    return {
        "num_tc": options.traffic_classes,
        "prio_tc_map": options.priomap,
        "hw": options.hardware,
        "count": [*(count for count, _ in options.queues), *unused],
        "offset": [*(first for _, first in options.queues), *unused],
    }


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
    return message(RTM_NEWTCLASS, flags, ifindex, new.classid, new.parent, Htb.kind, options)
