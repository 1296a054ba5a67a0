"""The marks: one table that joins lane, socket priority, DSCP and traffic class.

Everything else (the qdisc tree, the classifier's map, the training shim, the status
display) reads it from here. A local packet belongs to lane *i* only if its socket
priority **and** its DSCP are lane *i*'s; all others belong to the default band.

Sources: DSCP code points are those of RFC 2474 (CS), RFC 2597 (AF) and RFC 4594; socket
priorities are ``SO_PRIORITY`` of socket(7): 0 to 6 need no privilege.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlsched.errors import ConfigError

LANE_COUNT = 6
# CS5 CS4 CS3 CS2 AF12 CS1. Not AF11: setting that alone gives a socket priority 2 as well, which
# would be both marks of lane 4 in one call by somebody who never heard of lanes.
DEFAULT_DSCPS: tuple[int, ...] = (40, 32, 24, 16, 12, 8)
NETWORK_CONTROL_DSCPS = frozenset({48, 56})  # CS6, CS7: routing protocols (RFC 4594, section 3.2)
DEFAULT_BAND = "default"

# skb->priority of lane 0 where a tree goes by a map of priorities; the next lanes' follow. From 7
# on SO_PRIORITY takes CAP_NET_ADMIN (socket(7)): without the classifier nobody is in a lane. The
# maps have 16 entries (TC_PRIO_MAX, <linux/pkt_sched.h>).
FIRST_MAPPED = 8
DEFAULT_MAPPED = 0

# Major number of our root qdisc. It tells ours from another's: `tc qdisc` shows "7150:".
MAJOR = 0x7150
ROOT_HANDLE = MAJOR << 16


@dataclass(frozen=True, slots=True)
class Band:
    """One class of the qdisc tree, and the marks that lead a packet into it.

    ``priority`` (``SO_PRIORITY``) and ``dscp`` (0 to 63) are None for the default band,
    which takes whatever no lane claims. ``order`` is the strict order of service, 0 first.
    ``skb_priority`` is what the classifier makes of ``skb->priority``, for the tree to go by; None
    is the band's class (HTB).
    """

    name: str
    order: int
    priority: int | None
    dscp: int | None
    skb_priority: int | None = None

    @property
    def minor(self) -> int:
        """Minor number of the band's class (0x10 for the first band)."""
        return 0x10 + self.order

    @property
    def classid(self) -> int:
        """What ``skb->priority`` becomes: a class as a 32-bit handle, or ``skb_priority``."""
        return ROOT_HANDLE | self.minor if self.skb_priority is None else self.skb_priority

    @property
    def tos(self) -> int | None:
        """The IPv4 TOS or IPv6 traffic-class byte with the ECN bits clear (RFC 3168)."""
        return None if self.dscp is None else self.dscp << 2


def priority_set_by_tos(dscp: int) -> int:
    """The priority that IP_TOS with this DSCP gives a socket (ip(7); the kernel's ip_tos2prio).

    It depends on the two bits that RFC 1349 called low delay and high throughput.
    """
    return (0, 2, 6, 4)[(dscp >> 1) & 3]


def lane_bands(dscps: Sequence[int] = DEFAULT_DSCPS) -> tuple[Band, ...]:
    """The lanes' bands, most urgent first, with the administrator's ``dscps``.

    Raises ConfigError when ``dscps`` is not six distinct code points between 1 and 63, takes one
    that belongs to network control, or one that alone brings its lane's priority with it.
    """
    if len(dscps) != LANE_COUNT or len(set(dscps)) != LANE_COUNT:
        raise ConfigError(
            f"{LANE_COUNT} distinct DSCPs are needed, got {list(dscps)}",
            hint="give one code point for each lane, most urgent first",
        )
    for dscp in dscps:
        if not 1 <= dscp <= 63:
            raise ConfigError(
                f"DSCP {dscp} is out of range", hint="use 1 to 63; 0 is everybody's default"
            )
        if dscp in NETWORK_CONTROL_DSCPS:
            raise ConfigError(
                f"DSCP {dscp} belongs to network control (RFC 4594)",
                hint="use another code point: routing protocols depend on this one",
            )
    bands = tuple(
        Band(f"lane{lane}", order=lane, priority=LANE_COUNT - lane, dscp=dscp)
        for lane, dscp in enumerate(dscps)
    )
    for band, dscp in zip(bands, dscps, strict=True):
        if band.priority == priority_set_by_tos(dscp):
            raise ConfigError(
                f"DSCP {dscp} does not suit {band.name}: a program that sets it gets priority "
                f"{band.priority} from the kernel too, and so both marks",
                hint="use another code point for this lane",
            )
    return bands


def check_lanes(lanes: Sequence[int]) -> tuple[int, ...]:
    """``lanes`` as a tuple: some of the six, most urgent first. Raises ConfigError."""
    chosen = tuple(lanes)
    rising = all(a < b for a, b in itertools.pairwise(chosen))
    if not chosen or not rising or not 0 <= chosen[0] <= chosen[-1] < LANE_COUNT:
        raise ConfigError(
            f"lanes {list(chosen)} cannot be used",
            hint=f"give some of 0 to {LANE_COUNT - 1} in rising order, for instance range(0, 3)",
        )
    return chosen


def all_bands(dscps: Sequence[int] = DEFAULT_DSCPS) -> tuple[Band, ...]:
    """The lanes' bands, then the default band (same errors as :func:`lane_bands`)."""
    default = Band(DEFAULT_BAND, order=LANE_COUNT, priority=None, dscp=None)
    return (*lane_bands(dscps), default)


def mapped_bands(bands: Sequence[Band]) -> tuple[Band, ...]:
    """``bands`` (lanes first, default last) for a tree that goes by a map of priorities.

    Lanes get 8 to 13, which need no class number: under mq every queue's qdisc has its own.
    """
    *lanes, default = bands
    mapped = [replace(band, skb_priority=FIRST_MAPPED + band.order) for band in lanes]
    return (*mapped, replace(default, skb_priority=DEFAULT_MAPPED))
