"""Where a link differs from what attach set up: each change that would mend it, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tlsched.tc import changes as ch
from tlsched.tc.options import Bfifo
from tlsched.tc.tree import ROOT_PARENT, Queue

ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Drift:
    """One thing that is not as attach left it: what, how it is, how it should be."""

    what: str
    is_now: str
    should_be: str

    def __str__(self) -> str:
        """The difference as a line for people."""
        return f"{self.what} is {self.is_now}, should be {self.should_be}"

    def as_dict(self) -> dict[str, str]:
        """The difference as `status --json` prints it."""
        return {"what": self.what, "is": self.is_now, "should_be": self.should_be}


def of_changes(changes: Sequence[ch.Change]) -> list[Drift]:
    """What ``changes`` would mend, one entry for each thing that is not as it was attached."""
    rebuilt = [change for change in changes if isinstance(change, ch.AddRoot)]
    if rebuilt:  # then everything below is made anew, which says nothing about what is wrong
        return list(_of_change(rebuilt[0]))
    missing = {change.new.classid for change in changes if isinstance(change, ch.AddClass)}
    return [
        drift
        for change in changes
        if isinstance(change, ch.AddClass) or _class_of(change) not in missing
        for drift in _of_change(change)
    ]


def _of_change(change: ch.Change) -> Iterator[Drift]:
    match change:
        case ch.ChangeClass(old=old, new=new):
            for label, is_now, should_be in ch.class_differences(old, new):
                yield Drift(f"{label} of class {ch.named(new.classid)}", is_now, should_be)
        case ch.AddClass(new=new):
            yield Drift(f"class {ch.named(new.classid)}", ABSENT, "there")
        case ch.DelClass(classid=classid):
            yield Drift(f"class {ch.named(classid)}", "there", ABSENT)
        case ch.SetQueue(new=queue, replaces=replaces):
            there = replaces or "the kernel's own"
            yield Drift(f"queue of class {ch.place(queue)}", there, ch.described(queue))
        case ch.ChangeQueue(old=Bfifo(limit_bytes=old), new=Queue(options=Bfifo() as new) as leaf):
            bounds = (f"{old} bytes", f"{new.limit_bytes} bytes")
            yield Drift(f"limit of the queue of class {ch.place(leaf)}", *bounds)
        case ch.ChangeQueue(old=old, new=queue):
            where = "root" if queue.parent == ROOT_PARENT else f"queue of class {ch.place(queue)}"
            yield Drift(f"settings of the {where}", old.describe(), queue.options.describe())
        case ch.AddRoot(handle=handle, options=options):
            wanted = f"{options.kind} {ch.show(handle)} with attach's classes"
            yield Drift("root qdisc", "built otherwise", wanted)
        case _:
            yield Drift("link", "not as it was attached", f"as after: {change.describe()}")


def _class_of(change: ch.Change) -> int | None:
    match change:
        case ch.ChangeClass(new=new):
            return new.classid
        case ch.SetQueue(new=queue) | ch.ChangeQueue(new=queue):
            return queue.parent
    return None
