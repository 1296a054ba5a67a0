"""Trees that order the bands at the device's own speed, without a rate. Pure.

With a share for the default band (and once under each queue of an mq root, where the device has
several transmit queues)::

    7150:  ets, two bands that share by deficit round robin, quanta lanes : default
    ├ band 1  7151: ets, six strict bands
    │         ├ 7160: bfifo  lane 0
    │         └ …
    └ band 2  7166: bfifo    default

Without one, the seven bands of a ``prio``: nothing is guaranteed to the default band then.

Bands are chosen by skb->priority through the qdiscs' maps, not by class number, which under mq
would be another one in each queue. 8 to 13 are the lanes' (tlsched/bands.py).

Order only shows where packets wait: when the device takes no more (its ring is full, or byte
queue limits say so). That is so on a card, and on a tun device; a veth takes everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tlsched.bands import (
    FIRST_MAPPED,
    LANE_COUNT,
    MAJOR,
    ROOT_HANDLE,
    Band,
)
from tlsched.tc.options import Bfifo, Ets, Mq, Mqprio, Options, Prio
from tlsched.tc.tree import GSO_BYTES, LEAF_S, ROOT_PARENT, Queue, Tree

PRIORITIES = 16  # TC_PRIO_MAX + 1, <linux/pkt_sched.h>
TOP_BANDS = 2

# Majors of what lies under an mq's queues: sixteen for each queue, all below 0x7150 and below
# those that the kernel gives out by itself (0x8000 and up, qdisc_alloc_handle).
MQ_MAJOR = 0x4000
MQ_STRIDE = 0x10
MAX_QUEUES = (MAJOR - MQ_MAJOR) // MQ_STRIDE

# A leaf is emptied by the device as fast as it can, not by a timer, so its bound needs no more than
# what a full ring takes between two interrupts. It is as long as under HTB, for the same reason:
# above what TCP leaves in a queue by itself (two GSO packets or a millisecond a flow), and short
# enough that a new connection opens soon. A device of unknown speed may be a fast one. A bound
# is not an allocation.
MIN_LEAF_BYTES = 16 * GSO_BYTES
ASSUMED_BPS = 10_000_000_000
# What recent kernels cut a quantum to (Debian's 6.1.192 does). A band whose quantum is less than
# a packet saves it up over several rounds, so the share is kept all the same.
MAX_QUANTUM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Handles:
    """Handles of one subtree; ``parent`` is what its top hangs on."""

    parent: int
    top: int
    inner: int
    first_leaf: int

    def leaf(self, order: int) -> int:
        return self.first_leaf + (order << 16)


def strict_tree(share: float, limit_bytes: int, tx_queues: int, bands: Sequence[Band]) -> Tree:
    """The tree of a device with ``tx_queues`` transmit queues, ``share`` for the last band.

    A share of 0 makes it a prio, any other an ets. Leaves hold ``limit_bytes``.
    """
    leaf = Bfifo(limit_bytes)
    if tx_queues == 1:
        top, *below = _subtree(_single(), share, leaf, bands)
        return Tree(ROOT_HANDLE, top.options, queues=tuple(below))
    queues = [
        queue
        for number in range(tx_queues)
        for queue in _subtree(_under_mq(number), share, leaf, bands)
    ]
    return Tree(ROOT_HANDLE, Mq(), queues=tuple(queues))


def card_tree(tx_queues: int, bands: Sequence[Band]) -> Tree:
    """The tree that leaves the order to the card: mqprio, the first lane in the highest class.

    Class numbers rise with urgency (IEEE 802.1Q); the kernel's default queues stay below.
    """
    count = tx_queues // len(bands)
    queues = tuple((count, number * count) for number in range(len(bands)))
    return Tree(ROOT_HANDLE, Mqprio(_CARD, queues))


def leaf_limit_bytes(speed_bps: int | None) -> int:
    """Bound of a leaf: LEAF_S of the device's speed, 1 MiB at least."""
    return max(MIN_LEAF_BYTES, int((speed_bps or ASSUMED_BPS) / 8 * LEAF_S))


def share_of(options: Options | None) -> float | None:
    """The default band's share that the top of a subtree gives; 0 for prio, None for others."""
    if isinstance(options, Ets) and options.bands == TOP_BANDS and all(options.quanta):
        lanes, default = options.quanta
        return default / (lanes + default)
    return 0.0 if isinstance(options, Prio) else None


def is_root(options: Options | None) -> bool:
    """Whether these are the options of a root of ours (not mq's, which has none)."""
    if isinstance(options, Ets):
        shape = (options.strict, options.bands, options.priomap)
        return shape == (0, TOP_BANDS, _top(0.5).priomap)
    if isinstance(options, Mqprio):
        return options.priomap == _CARD
    return options == _PRIO


def is_our_handle(handle: int, parent: int) -> bool:
    """Whether a qdisc right under our root, at ``parent``, bears the handle that ours has there."""
    under_mq = _under_mq((parent & 0xFFFF) - 1).top
    single = _single()
    return handle in (under_mq, single.inner, *map(single.leaf, range(LANE_COUNT + 1)))


def _subtree(at: _Handles, share: float, leaf: Bfifo, bands: Sequence[Band]) -> Iterator[Queue]:
    """Top, inner and leaves, parents first."""
    if share == 0:
        yield Queue(at.top, at.parent, _PRIO)
        for band in bands:
            yield Queue(at.leaf(band.order), at.top | band.order + 1, leaf, band.name)
        return
    *lanes, default = bands
    yield Queue(at.top, at.parent, _top(share))
    yield Queue(at.inner, at.top | 1, _INNER)
    for band in lanes:
        yield Queue(at.leaf(band.order), at.inner | band.order + 1, leaf, band.name)
    yield Queue(at.leaf(default.order), at.top | 2, leaf, default.name)


def _single() -> _Handles:
    return _Handles(ROOT_PARENT, ROOT_HANDLE, MAJOR + 1 << 16, MAJOR + 0x10 << 16)


def _under_mq(number: int) -> _Handles:
    base = MQ_MAJOR + number * MQ_STRIDE
    top, inner = base + LANE_COUNT + 1, base + LANE_COUNT + 2
    return _Handles(ROOT_HANDLE | number + 1, top << 16, inner << 16, base << 16)


def _top(share: float) -> Ets:
    """Two sharing bands: the smaller quantum is one GSO packet, or the larger one the most."""
    lanes, default = 1 - share, share
    scale = min(GSO_BYTES / min(lanes, default), MAX_QUANTUM_BYTES / max(lanes, default))
    quanta = tuple(round(scale * part) for part in (lanes, default))
    return Ets(0, quanta, _priomap([0] * LANE_COUNT, other=1))


def _priomap(lanes: list[int], other: int) -> tuple[int, ...]:
    mapped = dict(enumerate(lanes, start=FIRST_MAPPED))
    return tuple(mapped.get(priority, other) for priority in range(PRIORITIES))


# What is in the lanes' half is a lane's; anything else that got there goes last.
_INNER = Ets(LANE_COUNT, (0,) * LANE_COUNT, _priomap(list(range(LANE_COUNT)), other=LANE_COUNT - 1))
_PRIO = Prio(LANE_COUNT + 1, _priomap(list(range(LANE_COUNT)), other=LANE_COUNT))
_CARD = _priomap(list(range(LANE_COUNT, 0, -1)), other=0)
