"""What a link has, as data: the other side of the comparison. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tlsched.bands import ROOT_HANDLE
from tlsched.tc.options import Ets, Htb, Mq, Mqprio, Options, Prio
from tlsched.tc.strict import is_our_handle, is_root
from tlsched.tc.tree import DEFAULT_MINOR, INNER_CLASSID, MAJOR_MASK, ROOT_PARENT, HtbClass
from tlsched.tc.u32 import GUEST_NODE, NODE_MASK, NUMBER_MASK, OWNER_NODE, PRIOS, Match

EGRESS = 0xFFFFFFF3  # TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS), <linux/pkt_sched.h>
INGRESS = 0xFFFFFFF2
KERNELS_HANDLES = 0x80000000  # from here up where nobody named one (qdisc_alloc_handle)
CLSACT_PARENT = 0xFFFFFFF1  # TC_H_CLSACT, and TC_H_INGRESS: a link has one of the two

# Where our classifier sits, always: so that a second attach replaces it and adds no other.
FILTER_PRIO = 0x7150
FILTER_HANDLE = 0x1
# The filter's name says whether attach made the clsact qdisc (then detach may remove it) or
# found it there: the only record of it, kept in the kernel beside what it is about.
NAME_OWNER = "tlsched+clsact"
NAME_GUEST = "tlsched"


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of a class or a queue since it was made; ``backlog_bytes`` is what waits now."""

    packets: int = 0
    bytes: int = 0
    backlog_bytes: int = 0
    drops: int = 0


@dataclass(frozen=True, slots=True)
class Qdisc:
    """One qdisc. ``options`` are None for a kind that no tree of ours has.

    ``shares_ingress`` and ``shares_egress``: its filters are a numbered block that other links
    may use as well (tc(8), ingress_block and egress_block).
    """

    kind: str
    handle: int
    parent: int
    options: Options | None = None
    stats: Stats = Stats()
    shares_ingress: bool = False
    shares_egress: bool = False

    @property
    def is_kernel_default(self) -> bool:
        """Whether the kernel made it by itself: those alone have handle 0 (qdisc_create_dflt)."""
        return self.handle == 0


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter. ``program_id`` and ``tag`` are those of a bpf filter's program.

    ``match`` is that of a u32 filter of ours.
    """

    parent: int
    kind: str
    prio: int
    handle: int
    name: str | None = None
    program_id: int | None = None
    tag: str | None = None
    protocol: int = 0
    match: Match | None = None

    @property
    def is_table(self) -> bool:
        """Whether it is no filter but a hash table of u32's, which a dump has beside them."""
        return self.kind == "u32" and self.handle & NODE_MASK == 0

    @property
    def is_ours(self) -> bool:
        """Whether it is the classifier that attach put there, or a part of it."""
        if self.kind == "u32":
            node = self.handle & NODE_MASK & ~NUMBER_MASK
            ours = self.is_table or node in (OWNER_NODE, GUEST_NODE)
            return ours and self.prio in PRIOS and self.parent in (EGRESS, ROOT_HANDLE)
        place = (self.parent, self.kind, self.prio, self.handle)
        return place == (EGRESS, "bpf", FILTER_PRIO, FILTER_HANDLE) and self.name in (
            NAME_OWNER,
            NAME_GUEST,
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """All that tlsched looks at on one interface, read at one time.

    ``filters`` are those at clsact, ``root_filters`` those at our tree, where only u32 may be ours.
    ``tx_queues`` is how many transmit queues the device uses; it is read for an mq only.
    """

    iface: str
    ifindex: int
    qdiscs: tuple[Qdisc, ...] = ()
    classes: tuple[HtbClass, ...] = ()
    class_stats: Mapping[int, Stats] = field(default_factory=dict)
    filters: tuple[Filter, ...] = ()
    root_filters: tuple[Filter, ...] = ()
    tx_queues: int = 1

    @property
    def root(self) -> Qdisc | None:
        """The root qdisc; None where the kernel shows none (an interface that never was up)."""
        return next((qdisc for qdisc in self.qdiscs if qdisc.parent == ROOT_PARENT), None)

    @property
    def has_our_root(self) -> bool:
        """Whether the root is the one that attach makes.

        Anybody may choose our handle. Nobody else has an HTB with our default class as well, and
        either no class yet (an attach that was killed) or the one that all our others are
        under; or another root with our map of priorities, or our own queues under it.
        """
        root = self.root
        if root is None or root.handle != ROOT_HANDLE:
            return False
        match root.options:
            case Htb(default_minor=minor):
                inner = any(item.classid == INNER_CLASSID for item in self.classes)
                return minor == DEFAULT_MINOR and (inner or not self.classes)
            case Ets() | Prio() | Mqprio():
                return is_root(root.options) or any(self._are_ours(root))
            case Mq():
                return all(self._are_ours(root))
        return False

    def _are_ours(self, root: Qdisc) -> Iterator[bool]:
        """For each qdisc right under our root that somebody made: whether it is ours."""
        for queue in self.under(root):
            if 0 < queue.handle < KERNELS_HANDLES:
                yield is_our_handle(queue.handle, queue.parent)

    @property
    def has_foreign_root(self) -> bool:
        """Whether somebody configured the root, and not tlsched."""
        return self.root is not None and not (self.has_our_root or self.root.is_kernel_default)

    @property
    def has_clsact(self) -> bool:
        """Whether there is a clsact qdisc, ours or not."""
        return self.clsact is not None

    @property
    def clsact(self) -> Qdisc | None:
        """The clsact qdisc, ours or not."""
        return next((qdisc for qdisc in self.qdiscs if qdisc.kind == "clsact"), None)

    @property
    def foreign_ingress(self) -> Qdisc | None:
        """The qdisc that takes clsact's place: "ingress", which has no egress hook."""
        held = (qdisc for qdisc in self.qdiscs if qdisc.parent == CLSACT_PARENT)
        return next((qdisc for qdisc in held if qdisc.kind != "clsact"), None)

    @property
    def foreign_classifier(self) -> Filter | None:
        """Somebody else's filter where ours would go."""
        there = [item for item in self.filters if item.parent == EGRESS and item.prio in PRIOS]
        return next((item for item in there if not (item.is_ours or item.is_table)), None)

    @property
    def classifier(self) -> Filter | None:
        """Our bpf filter, if it is there."""
        return next((item for item in self.filters if item.kind == "bpf" and item.is_ours), None)

    @property
    def carries_ours(self) -> bool:
        """Whether anything on the interface is tlsched's."""
        return self.has_our_root or self.classifier is not None or bool(self.u32)

    @property
    def u32(self) -> tuple[Filter, ...]:
        """Our u32 filters, at clsact egress or at our HTB."""
        every = (*self.filters, *self.root_filters)
        return tuple(
            item for item in every if item.kind == "u32" and item.is_ours and not item.is_table
        )

    def u32_at(self, parent: int) -> tuple[Filter, ...]:
        """Those of our u32 filters that are at ``parent``."""
        return tuple(item for item in self.u32 if item.parent == parent)

    @property
    def foreign_root_filters(self) -> tuple[Filter, ...]:
        """Filters at our tree that send packets past the classifier."""
        return tuple(item for item in self.root_filters if not item.is_ours)

    @property
    def owns_clsact(self) -> bool:
        """Whether attach made the clsact qdisc.

        The filter's name says so. Without the filter, a tree of ours beside an empty clsact is
        what is left where somebody took it away; beside u32 filters at our HTB, which need no
        clsact, it is somebody's. Ours shares no block.
        """
        clsact = self.clsact
        if clsact is None or clsact.shares_ingress or clsact.shares_egress:
            return False
        if self.classifier is not None:
            return self.classifier.name == NAME_OWNER
        at_egress = self.u32_at(EGRESS)
        if at_egress:
            return all(item.handle & NODE_MASK & ~NUMBER_MASK == OWNER_NODE for item in at_egress)
        return self.has_our_root and not self.filters and not self.u32

    def under(self, above: Qdisc) -> list[Qdisc]:
        """The qdiscs right under one."""
        return [queue for queue in self.qdiscs if queue.parent & MAJOR_MASK == above.handle]

    def leaf_of(self, classid: int) -> Qdisc | None:
        """The queue under a class, or None for the kernel's own hidden pfifo."""
        return next((qdisc for qdisc in self.qdiscs if qdisc.parent == classid), None)
