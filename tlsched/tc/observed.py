"""What a link has, as data: the other side of the comparison. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tlsched.bands import ROOT_HANDLE
from tlsched.tc.tree import ROOT_KIND, ROOT_PARENT, HtbClass

EGRESS = 0xFFFFFFF3  # TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS), <linux/pkt_sched.h>
INGRESS = 0xFFFFFFF2

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
    """One qdisc. ``limit_bytes`` is a bfifo's, ``default_minor`` an HTB's; None on others."""

    kind: str
    handle: int
    parent: int
    limit_bytes: int | None = None
    default_minor: int | None = None
    stats: Stats = Stats()

    @property
    def is_kernel_default(self) -> bool:
        """Whether the kernel made it by itself: those alone have handle 0 (qdisc_create_dflt)."""
        return self.handle == 0


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter at clsact. ``program_id`` and ``tag`` are those of a bpf filter's program."""

    parent: int
    kind: str
    prio: int
    handle: int
    name: str | None = None
    program_id: int | None = None
    tag: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is the classifier that attach put there."""
        place = (self.parent, self.kind, self.prio, self.handle)
        return place == (EGRESS, "bpf", FILTER_PRIO, FILTER_HANDLE) and self.name in (
            NAME_OWNER,
            NAME_GUEST,
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """All that tlsched looks at on one interface, read at one time."""

    iface: str
    ifindex: int
    qdiscs: tuple[Qdisc, ...] = ()
    classes: tuple[HtbClass, ...] = ()
    class_stats: Mapping[int, Stats] = field(default_factory=dict)
    filters: tuple[Filter, ...] = ()

    @property
    def root(self) -> Qdisc | None:
        """The root qdisc; None where the kernel shows none (an interface that never was up)."""
        return next((qdisc for qdisc in self.qdiscs if qdisc.parent == ROOT_PARENT), None)

    @property
    def has_our_root(self) -> bool:
        """Whether the root is the one that attach makes."""
        return self.root is not None and (self.root.kind, self.root.handle) == (
            ROOT_KIND,
            ROOT_HANDLE,
        )

    @property
    def has_foreign_root(self) -> bool:
        """Whether somebody configured the root, and not tlsched."""
        return self.root is not None and not (self.has_our_root or self.root.is_kernel_default)

    @property
    def has_clsact(self) -> bool:
        """Whether there is a clsact qdisc, ours or not."""
        return any(qdisc.kind == "clsact" for qdisc in self.qdiscs)

    @property
    def classifier(self) -> Filter | None:
        """Our filter, if it is there."""
        return next((item for item in self.filters if item.is_ours), None)

    @property
    def carries_ours(self) -> bool:
        """Whether anything on the interface is tlsched's."""
        return self.has_our_root or self.classifier is not None

    @property
    def owns_clsact(self) -> bool:
        """Whether attach made the clsact qdisc.

        The filter's name says so. Without the filter, a tree of ours beside an empty clsact is
        what an attach leaves that was killed between its last two steps.
        """
        if not self.has_clsact:
            return False
        if self.classifier is not None:
            return self.classifier.name == NAME_OWNER
        return self.has_our_root and not self.filters

    def leaf_of(self, classid: int) -> Qdisc | None:
        """The queue under a class, or None for HTB's own hidden pfifo."""
        return next((qdisc for qdisc in self.qdiscs if qdisc.parent == classid), None)
