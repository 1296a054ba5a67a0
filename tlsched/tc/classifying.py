"""Which changes give a link its classifier: the BPF program, or u32 filters in its place. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tlsched.bands import ROOT_HANDLE
from tlsched.tc.changes import AddRoot, Change, DelClsact, DelFilter, DelU32, SetFilter, SetU32
from tlsched.tc.observed import (
    EGRESS,
    FILTER_HANDLE,
    FILTER_PRIO,
    NAME_GUEST,
    NAME_OWNER,
    Filter,
    Observed,
)
from tlsched.tc.u32 import GUEST_NODE, NODE_MASK, NUMBER_MASK, OWNER_NODE, Match, Place


def before_tree(
    observed: Observed, keep_program: bool, u32: tuple[Match, ...] = ()
) -> list[Change]:
    """What is done at clsact egress, and what has to leave our HTB.

    Adding clsact stops the device for a moment and empties its queues (qdisc_graft calls
    dev_deactivate): milliseconds under a busy HTB, next to nothing before it. So it comes first.
    """
    if not u32:
        leaving = [*remove_u32(observed, EGRESS), *remove_u32(observed, ROOT_HANDLE)]
        return [*leaving, *_set_bpf(observed, keep_program)]
    if at_htb(u32):
        return remove_from_egress(observed)
    return [*remove_u32(observed, ROOT_HANDLE), *_set_u32_at_egress(observed, u32)]


def after_tree(
    observed: Observed, changes: Sequence[Change], u32: tuple[Match, ...]
) -> list[Change]:
    """What is done at our HTB once it is there; ``changes`` are those that make it."""
    if not u32 or not at_htb(u32):
        return []
    rebuilt = any(isinstance(change, AddRoot) for change in changes)
    there = () if rebuilt else observed.u32_at(ROOT_HANDLE)
    if matches_of(there) == u32:
        return []
    return [SetU32(ROOT_HANDLE, u32, OWNER_NODE, clears=places(observed, there))]


def remove_from_egress(observed: Observed) -> list[Change]:
    """What takes all of ours away from clsact egress."""
    if observed.owns_clsact and all(item.is_ours for item in observed.filters):
        return [DelClsact()]  # and the filters with it
    return remove_filters(observed)


def remove_filters(observed: Observed) -> list[Change]:
    """What takes our filters at clsact egress away, and leaves clsact to others."""
    ours = observed.classifier
    if ours is not None:
        return [DelFilter(str(ours.name), ours.prio, ours.handle)]
    return remove_u32(observed, EGRESS)


def remove_u32(observed: Observed, parent: int) -> list[Change]:
    """What takes our u32 filters away from ``parent``."""
    there = observed.u32_at(parent)
    return [DelU32(parent, places(observed, there))] if there else []


def matches_of(filters: Sequence[Filter]) -> tuple[Match, ...]:
    """What u32 filters match, in their own order; one that we did not make so counts as none."""
    found = [item.match for item in filters if item.match is not None]
    complete = len(found) == len(filters)
    return tuple(sorted(found, key=lambda m: (m.prio, m.number))) if complete else ()


def places(observed: Observed, ours: Sequence[Filter]) -> tuple[Place, ...]:
    """Where ``ours`` are: whole prios, but one by one in a prio that others have filters in."""
    found: dict[Place, None] = {}
    every = (*observed.filters, *observed.root_filters)
    for item in ours:
        beside = [f for f in every if (f.parent, f.prio) == (item.parent, item.prio)]
        alone = all(f.is_ours for f in beside)
        found[Place(item.prio, item.protocol, 0 if alone else item.handle)] = None
    return tuple(found)


def at_htb(u32: Sequence[Match]) -> bool:
    """Whether these filters name classes, which only a qdisc's own filters can."""
    return any(item.classid is not None for item in u32)


def node_of(ours: Sequence[Filter]) -> int:
    """The first node of filters that are there: whose clsact they stand at."""
    return ours[0].handle & NODE_MASK & ~NUMBER_MASK


def _set_bpf(observed: Observed, keep_program: bool) -> list[Change]:
    ours = observed.classifier
    if ours is not None:
        if keep_program:
            return []
        return [SetFilter(str(ours.name), ours.prio, ours.handle, ours.program_id)]
    if not observed.has_clsact:
        return [SetFilter(NAME_OWNER, FILTER_PRIO, FILTER_HANDLE, add_clsact=True)]
    name = NAME_OWNER if observed.owns_clsact else NAME_GUEST
    return [SetFilter(name, FILTER_PRIO, FILTER_HANDLE)]


def _set_u32_at_egress(observed: Observed, u32: tuple[Match, ...]) -> list[Change]:
    there = observed.u32_at(EGRESS)
    if matches_of(there) == u32:
        return []
    changes: list[Change] = []
    program = observed.classifier
    if program is not None:  # a prio has filters of one kind only
        changes.append(DelFilter(str(program.name), program.prio, program.handle))
    owner = observed.owns_clsact or not observed.has_clsact
    node = OWNER_NODE if owner else GUEST_NODE
    clears = places(observed, there)
    return [*changes, SetU32(EGRESS, u32, node, not observed.has_clsact, clears)]
