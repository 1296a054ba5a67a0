"""One step from what a link has to what it should have. Values only: kernel.py applies them."""

from __future__ import annotations

from dataclasses import dataclass

from tlsched.bands import DEFAULT_BAND, LANE_COUNT, ROOT_HANDLE
from tlsched.config import format_rate
from tlsched.tc.options import Htb, Options
from tlsched.tc.tree import INNER_CLASSID, TICK_NS, HtbClass, Queue
from tlsched.tc.u32 import Match, Place


class Change:
    """Base of all changes; ``describe()`` is the line that a dry run prints."""

    __slots__ = ()

    def describe(self) -> str:
        """What the change does, in one line."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AddRoot(Change):
    """Put our qdisc at the root. Until an HTB's default class exists, packets pass it unshaped.

    ``replaces`` is the kind of the root that goes; ``foreign`` whether somebody configured it.
    """

    handle: int
    options: Options
    replaces: str | None
    foreign: bool = False

    def describe(self) -> str:
        """What the change does, in one line."""
        what = self.options.describe()
        if isinstance(self.options, Htb):
            what = f"default class {show(self.handle | self.options.default_minor)}"
        line = f"add qdisc {self.options.kind} {show(self.handle)} at the root, {what}"
        if self.replaces is None:
            return line
        whose = "somebody's" if self.foreign else "the kernel's default"
        return f"{line}, in place of {whose} {self.replaces}"


@dataclass(frozen=True, slots=True)
class DelRoot(Change):
    """Remove the root qdisc; the kernel puts its default there."""

    kind: str
    handle: int

    def describe(self) -> str:
        """What the change does, in one line."""
        name = f"{self.kind} {show(self.handle)}"
        return f"delete qdisc {name} at the root (the kernel's default returns)"


@dataclass(frozen=True, slots=True)
class AddClass(Change):
    """Add a class, with the kernel's own packet-bounded queue under it.

    It takes packets from the moment it exists, and whatever waits in the kernel's own queue is
    lost when ours takes its place. So a band's class starts without a limit, that nothing
    waits there, and gets its rates afterwards.
    """

    new: HtbClass

    def describe(self) -> str:
        """What the change does, in one line."""
        new = self.new
        return (
            f"add class {named(new.classid)} under {show(new.parent)}: prio {new.prio},"
            f" rate {format_rate(new.rate_bps)}, ceil {format_rate(new.ceil_bps)}"
        )


@dataclass(frozen=True, slots=True)
class ChangeClass(Change):
    """Change a class in place; what waits in it stays."""

    old: HtbClass
    new: HtbClass

    def describe(self) -> str:
        """What the change does, in one line."""
        pairs = class_differences(self.old, self.new)
        steps = [f"{label} {old} -> {new}" for label, old, new in pairs]
        return f"change class {named(self.new.classid)}: {', '.join(steps)}"


@dataclass(frozen=True, slots=True)
class DelClass(Change):
    """Remove a class that is not part of the tree."""

    classid: int

    def describe(self) -> str:
        """What the change does, in one line."""
        return f"delete class {show(self.classid)}"


@dataclass(frozen=True, slots=True)
class SetQueue(Change):
    """Put a qdisc under a class or band, in place of whatever stands there.

    ``clear_first`` deletes that one first, in the same system call.
    """

    new: Queue
    replaces: str | None = None
    clear_first: bool = False

    def describe(self) -> str:
        """What the change does, in one line."""
        tail = f", in place of {self.replaces}" if self.replaces else ""
        return f"add qdisc {described(self.new)} under {place(self.new)}{tail}"


@dataclass(frozen=True, slots=True)
class ChangeQueue(Change):
    """Change a qdisc's options in place; what waits in it stays."""

    old: Options
    new: Queue

    def describe(self) -> str:
        """What the change does, in one line."""
        before, after = self.old.describe(), self.new.options.describe()
        name = f"{self.new.options.kind} {show(self.new.handle)}"
        return f"change qdisc {name} {before} -> {after}"


@dataclass(frozen=True, slots=True)
class DelClsact(Change):
    """Remove the clsact qdisc, with our filters; those alone where others have come to it."""

    def describe(self) -> str:
        """What the change does, in one line."""
        return "delete qdisc clsact"


@dataclass(frozen=True, slots=True)
class SetFilter(Change):
    """Put our classifier at clsact egress, or replace it there in one atomic step.

    ``add_clsact`` adds the qdisc that holds it first; the filter's name says that it is ours.
    """

    name: str
    prio: int
    handle: int
    replaces_program: int | None = None
    add_clsact: bool = False

    def describe(self) -> str:
        """What the change does, in one line."""
        place = f"classifier {self.name} at clsact egress, prio {self.prio}"
        if self.add_clsact:
            return f"add qdisc clsact and {place}"
        if self.replaces_program is None:
            return f"add {place}"
        return f"replace {place} (was program {self.replaces_program})"


@dataclass(frozen=True, slots=True)
class DelFilter(Change):
    """Remove our classifier."""

    name: str
    prio: int
    handle: int

    def describe(self) -> str:
        """What the change does, in one line."""
        return f"delete classifier {self.name} at clsact egress, prio {self.prio}"


@dataclass(frozen=True, slots=True)
class SetU32(Change):
    """Put u32 filters at ``parent`` (clsact egress, or our HTB), in one system call.

    ``first_node`` says whose clsact it is; ``add_clsact`` adds that first; ``clears`` are the
    filters of ours that go.
    """

    parent: int
    matches: tuple[Match, ...]
    first_node: int
    add_clsact: bool = False
    clears: tuple[Place, ...] = ()

    def describe(self) -> str:
        """What the change does, in one line."""
        where = "clsact egress" if self.parent != ROOT_HANDLE else f"qdisc htb {show(self.parent)}"
        verb = "replace" if self.clears else "add"
        first = "add qdisc clsact and " if self.add_clsact else f"{verb} "
        return f"{first}{len(self.matches)} u32 filters for the lanes' DSCPs at {where}"


@dataclass(frozen=True, slots=True)
class DelU32(Change):
    """Remove u32 filters of ours."""

    parent: int
    clears: tuple[Place, ...]

    def describe(self) -> str:
        """What the change does, in one line."""
        where = "clsact egress" if self.parent != ROOT_HANDLE else f"qdisc htb {show(self.parent)}"
        return f"delete the u32 filters for the lanes' DSCPs at {where}"


def show(handle: int) -> str:
    """A handle or class id as tc writes it: 7150:, 7150:10."""
    major, minor = handle >> 16, handle & 0xFFFF
    return f"{major:x}:{minor:x}" if minor else f"{major:x}:"


def class_differences(old: HtbClass, new: HtbClass) -> list[tuple[str, str, str]]:
    """In words: each field in which two classes differ, its old and its new value."""
    return [
        (label, form(getattr(old, field)), form(getattr(new, field)))
        for label, field, form in _CLASS_FIELDS
        if getattr(old, field) != getattr(new, field)
    ]


def named(classid: int) -> str:
    """A class id as tc writes it, with the band's name: 7150:10 (lane0)."""
    if classid == INNER_CLASSID:
        return f"{show(classid)} (link)"
    order = (classid & 0xFFFF) - 0x10
    known = classid & 0xFFFF0000 == ROOT_HANDLE and 0 <= order <= LANE_COUNT
    if not known:
        return show(classid)
    return f"{show(classid)} ({DEFAULT_BAND if order == LANE_COUNT else f'lane{order}'})"


def place(queue: Queue) -> str:
    """Where a queue hangs, as tc writes it, with its band's name: 7151:1 (lane0)."""
    return f"{show(queue.parent)} ({queue.band})" if queue.band else named(queue.parent)


def described(queue: Queue) -> str:
    """A queue in words: kind, handle and options."""
    return f"{queue.options.kind} {show(queue.handle)} {queue.options.describe()}"


def _ticks(ticks: int) -> str:
    return f"{ticks * TICK_NS / 1000:g}us"


_CLASS_FIELDS = (
    ("parent", "parent", show),
    ("prio", "prio", str),
    ("rate", "rate_bps", format_rate),
    ("ceil", "ceil_bps", format_rate),
    ("burst", "burst_ticks", _ticks),
    ("cburst", "cburst_ticks", _ticks),
    ("quantum", "quantum_bytes", str),
)
