"""The qdisc tree that a link should have, as data, and the tree of HTB. Pure.

::

    7150:  htb, unclassified packets go to 7150:16
    └ 7150:1   rate = ceil = the link's rate
      ├ 7150:10  lane 0   rate tiny, ceil = link, prio 0   └ 7160: bfifo
      ├ …
      ├ 7150:15  lane 5   rate tiny, ceil = link, prio 5   └ 7165: bfifo
      └ 7150:16  default  rate = guaranteed share, ceil = link, prio 6   └ 7166: bfifo

HTB serves by level first, then by prio (net/sched/sch_htb.c, htb_dequeue): a class that is
still under its own rate is served before any class that borrows. So a lane has next to no
rate of its own and borrows nearly all it sends, in strict order of prio, while the default
band's own rate is what it is guaranteed, however busy the lanes are. The trees that need no
rate are in strict.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tlsched.bands import MAJOR, ROOT_HANDLE, Band, all_bands
from tlsched.tc.options import Bfifo, Htb, Options

INNER_CLASSID = ROOT_HANDLE | 0x1
DEFAULT_MINOR = all_bands()[-1].minor
ROOT_PARENT = 0xFFFFFFFF  # TC_H_ROOT, <linux/pkt_sched.h>
MAJOR_MASK = 0xFFFF0000  # TC_H_MAJ_MASK

# One GSO packet is up to 64 KiB (GSO_LEGACY_MAX_SIZE, <linux/netdevice.h>).
GSO_BYTES = 65536
# HTB keeps time in ticks of 64 ns (PSCHED_SHIFT 6, include/net/pkt_sched.h).
TICK_NS = 64
# The least that a class needs, and enough that it is never the reason why a lane goes first.
LANE_RATE_BPS = 8000
# Only classes of one prio share by quantum and here every prio has one class, but HTB derives
# it from the rate when it is missing and logs "quantum of class is big" or "small".
QUANTUM_BYTES = GSO_BYTES
# Credit for the timer being late: HTB sleeps until a class may send again, and on a busy CPU the
# soft interrupt that wakes it waits behind a time slice of the scheduler (3 to 4 ms). What it
# may then send at once is the burst. Nothing is lost to strictness by it: order is by prio.
BURST_S = 0.004
MIN_BURST_BYTES = 16384
# A full leaf holds a packet back this long at the link's rate: twice the burst, so that there is
# something to send when the timer is late, and short enough that a new connection opens in
# milliseconds behind it. TCP by itself queues about a millisecond's worth (tcp_small_queue_check).
LEAF_S = 0.008
MIN_LEAF_BYTES = 4 * GSO_BYTES


@dataclass(frozen=True, slots=True)
class HtbClass:
    """One HTB class. Rates in bit/s, bursts in ticks of 64 ns (time, as the kernel holds them)."""

    classid: int
    parent: int
    prio: int
    rate_bps: int
    ceil_bps: int
    burst_ticks: int
    cburst_ticks: int
    quantum_bytes: int


@dataclass(frozen=True, slots=True)
class Queue:
    """A qdisc below the root; ``band`` names the band whose packets it holds, if one's alone."""

    handle: int
    parent: int
    options: Options
    band: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Tree:
    """Root qdisc, HTB's classes (the inner one first) and all qdiscs below, parents first."""

    handle: int
    root: Options
    classes: tuple[HtbClass, ...] = ()
    queues: tuple[Queue, ...] = ()

    @property
    def default_classid(self) -> int:
        """HTB's class of packets that no band claims; the root itself on other trees."""
        return self.handle | (self.root.default_minor if isinstance(self.root, Htb) else 0)

    @property
    def kind(self) -> str:
        """The root's kind."""
        return self.root.kind


def desired_tree(rate_bps: int, share_bps: int, bands: Sequence[Band]) -> Tree:
    """The tree of a link of ``rate_bps`` whose last band is guaranteed ``share_bps`` (bit/s).

    ``bands`` are the lanes in strict order, the default band last, as
    :func:`tlsched.bands.all_bands` gives them.
    """
    inner = HtbClass(
        classid=INNER_CLASSID,
        parent=ROOT_HANDLE,
        prio=0,
        rate_bps=rate_bps,
        ceil_bps=rate_bps,
        burst_ticks=_burst_ticks(rate_bps),
        cburst_ticks=_burst_ticks(rate_bps),
        quantum_bytes=QUANTUM_BYTES,
    )
    classes = [inner]
    for band in bands:
        own_bps = share_bps if band.priority is None else LANE_RATE_BPS
        classes.append(_band_class(band, own_bps, rate_bps))
    leaf = Bfifo(leaf_limit_bytes(rate_bps))
    queues = tuple(Queue(leaf_handle(band), band.classid, leaf, band.name) for band in bands)
    return Tree(ROOT_HANDLE, Htb(bands[-1].minor), tuple(classes), queues)


def leaf_handle(band: Band) -> int:
    """Handle of a band's queue: 7160: for the first band, 7161: for the second, and so on."""
    return (MAJOR + band.minor) << 16


def leaf_limit_bytes(rate_bps: int) -> int:
    """Bound of a leaf queue: LEAF_S of the link's rate, four GSO packets at least."""
    return max(MIN_LEAF_BYTES, int(rate_bps / 8 * LEAF_S))


def _band_class(band: Band, own_bps: int, link_bps: int) -> HtbClass:
    return HtbClass(
        classid=band.classid,
        parent=INNER_CLASSID,
        prio=band.order,
        rate_bps=own_bps,
        ceil_bps=link_bps,
        burst_ticks=_ticks(MIN_BURST_BYTES, own_bps),
        # Twice the inner class's, so that a band never runs out before the link does: a class
        # over its ceil steps aside, and the next band would send although this one still waits.
        cburst_ticks=2 * _burst_ticks(link_bps),
        quantum_bytes=QUANTUM_BYTES,
    )


def _burst_ticks(rate_bps: int) -> int:
    return _ticks(max(MIN_BURST_BYTES, int(rate_bps / 8 * BURST_S)), rate_bps)


def _ticks(size_bytes: int, rate_bps: int) -> int:
    """Time that ``size_bytes`` take at ``rate_bps``, rounded up to whole ticks."""
    return -(-size_bytes * 8 * 10**9 // (rate_bps * TICK_NS))
