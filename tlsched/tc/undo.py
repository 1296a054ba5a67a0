"""What leads a link back to what it was before a change that failed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tlsched.bands import ROOT_HANDLE
from tlsched.tc.changes import AddRoot, Change, DelClsact, DelFilter, DelRoot, SetFilter, SetU32
from tlsched.tc.classifying import matches_of, node_of, places, remove_u32
from tlsched.tc.diff import tree_changes
from tlsched.tc.observed import EGRESS, Observed, Qdisc
from tlsched.tc.tree import INNER_CLASSID, Queue, Tree


def undo_changes(before: Observed, now: Observed) -> list[Change]:
    """What leads from ``now``, left by a failed attach or detach, back to ``before``.

    A root of somebody else's that is gone is gone. SetFilter in the result means the program
    that the link had before.
    """
    changes: list[Change] = []
    if before.has_our_root:
        # Filters at the root are not ours to delete when nothing is to change.
        ours = tuple(item for item in now.root_filters if item.is_ours)
        changes += tree_changes(replace(now, root_filters=ours), _tree_as_it_was(before))
    elif now.has_our_root and now.root is not None:
        changes.append(DelRoot(now.root.kind, now.root.handle))
    classifier = [*_undo_classifier(before, now), *_undo_u32(before, now, EGRESS)]
    if not before.has_our_root:
        return [*changes, *classifier]
    if any(isinstance(change, AddRoot) for change in changes):
        now = replace(now, root_filters=())
    return [*changes, *classifier, *_undo_u32(before, now, ROOT_HANDLE)]


def _tree_as_it_was(before: Observed) -> Tree:
    root = before.root
    assert root is not None
    assert root.options is not None
    classes = sorted(before.classes, key=lambda item: (item.classid != INNER_CLASSID, item.classid))
    return Tree(root.handle, root.options, tuple(classes), tuple(_queues_below(before, root)))


def _queues_below(before: Observed, above: Qdisc) -> Iterator[Queue]:
    """All that somebody made below a qdisc and that we know how to make again, parents first."""
    for queue in before.under(above):
        if queue.options is not None and not queue.is_kernel_default:
            yield Queue(queue.handle, queue.parent, queue.options)
            yield from _queues_below(before, queue)


def _undo_classifier(before: Observed, now: Observed) -> list[Change]:
    old, new = before.classifier, now.classifier
    if old is None:
        if now.has_clsact and not before.has_clsact and all(f.is_ours for f in now.filters):
            return [DelClsact()]
        return [] if new is None else [DelFilter(str(new.name), new.prio, new.handle)]
    if new is not None and new.program_id == old.program_id:
        return []
    replaced = None if new is None else new.program_id
    return [SetFilter(str(old.name), old.prio, old.handle, replaced, not now.has_clsact)]


def _undo_u32(before: Observed, now: Observed, parent: int) -> list[Change]:
    old, new = before.u32_at(parent), now.u32_at(parent)
    if matches_of(old) == matches_of(new):
        return []
    if old:
        add = parent == EGRESS and not now.has_clsact
        return [SetU32(parent, matches_of(old), node_of(old), add, places(now, new))]
    gone = now.has_clsact and not before.has_clsact and all(f.is_ours for f in now.filters)
    return [] if gone and parent == EGRESS else remove_u32(now, parent)
