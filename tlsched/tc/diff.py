"""Observed against desired: the changes that lead from one to the other. Pure.

An empty list means that nothing is written. Whatever exists is changed in place, so a tree
that carries traffic loses no packet when its settings change.
"""

from __future__ import annotations

from dataclasses import replace

from tlsched.config import MAX_RATE_BPS
from tlsched.tc import classifying
from tlsched.tc.changes import (
    AddClass,
    AddRoot,
    Change,
    ChangeClass,
    ChangeQueue,
    DelClass,
    DelRoot,
    SetQueue,
)
from tlsched.tc.observed import Observed, Qdisc
from tlsched.tc.options import Htb, Mqprio, Options
from tlsched.tc.tree import INNER_CLASSID, MAJOR_MASK, ROOT_PARENT, HtbClass, Queue, Tree
from tlsched.tc.u32 import Match

OPEN_BPS = MAX_RATE_BPS


def attach_changes(
    observed: Observed, tree: Tree, *, keep_program: bool, u32: tuple[Match, ...] = ()
) -> list[Change]:
    """What leads from ``observed`` to ``tree`` plus classifier.

    ``keep_program`` says that the classifier that is there, if any, is the right one; ``u32`` are
    the filters that classify in its place. Whether a foreign root may be replaced was decided
    before.
    """
    first = classifying.before_tree(observed, keep_program, u32)
    changes = tree_changes(observed, tree)
    return [*first, *changes, *classifying.after_tree(observed, changes, u32)]


def detach_changes(observed: Observed) -> list[Change]:
    """What removes everything of ours from ``observed``, and nothing else."""
    changes: list[Change] = []
    if observed.has_our_root and observed.root is not None:
        changes.append(DelRoot(observed.root.kind, observed.root.handle))
    return [*changes, *classifying.remove_from_egress(observed)]


def tree_changes(observed: Observed, tree: Tree) -> list[Change]:
    """What makes the root qdisc and all below it the ``tree``."""
    root = observed.root
    if root is not None and _can_be_mended(observed, root, tree):
        below = [*_class_changes(observed, tree), *_queue_changes(observed, tree)]
        return [*_root_changes(root, tree), *below, *_stray_classes(observed, tree)]
    changes: list[Change] = []
    if root is not None and root.handle == tree.handle:
        # HTB cannot change its default class or a class's parent, a handle not its kind.
        changes.append(DelRoot(root.kind, root.handle))
        root = None
    kind = None if root is None else root.kind
    foreign = root is not None and not root.is_kernel_default
    changes.append(AddRoot(tree.handle, tree.root, kind, foreign))
    bare = replace(observed, qdiscs=(), classes=())
    return [*changes, *_class_changes(bare, tree), *_queue_changes(bare, tree)]


def _can_be_mended(observed: Observed, root: Qdisc, tree: Tree) -> bool:
    """Whether the root is ours and what cannot be changed in place is right.

    Filters at our root go with it: to delete one takes its chain's number, which a dump by
    pyroute2 lacks.
    """
    if observed.foreign_root_filters or not observed.has_our_root or root.options is None:
        return False
    if type(root.options) is not type(tree.root) or _handles_are_taken(observed, tree):
        return False
    if isinstance(tree.root, Htb | Mqprio):
        return same_options(root.options, tree.root) and _same_parents(observed, tree)
    return True


def _handles_are_taken(observed: Observed, tree: Tree) -> bool:
    """Whether somebody gave a handle of ours to a qdisc elsewhere; the kernel refuses it twice."""
    parents = {item.handle: item.parent for item in observed.qdiscs}
    return any(parents.get(item.handle, item.parent) != item.parent for item in tree.queues)


def _same_parents(observed: Observed, tree: Tree) -> bool:
    parents = {item.classid: item.parent for item in tree.classes}
    return all(parents.get(item.classid, item.parent) == item.parent for item in observed.classes)


def _root_changes(root: Qdisc, tree: Tree) -> list[Change]:
    if root.options is None or same_options(root.options, tree.root):
        return []
    return [ChangeQueue(root.options, Queue(tree.handle, ROOT_PARENT, tree.root))]


def _class_changes(observed: Observed, tree: Tree) -> list[Change]:
    """What makes HTB's classes, and the queue of each, those of the tree."""
    have = {item.classid: item for item in observed.classes}
    leaves = {leaf.parent: leaf for leaf in tree.queues}
    changes: list[Change] = []
    for want in tree.classes:
        leaf = leaves.get(want.classid)
        old = have.get(want.classid)
        if old is not None:
            if not _same_class(old, want):
                changes.append(ChangeClass(old, want))
            changes += _queue_change(observed.leaf_of(want.classid), leaf) if leaf else []
        elif leaf is None:
            changes.append(AddClass(want))
        else:
            opened = replace(want, rate_bps=OPEN_BPS, ceil_bps=OPEN_BPS)
            changes += [AddClass(opened), SetQueue(leaf), ChangeClass(opened, want)]
    return changes


def _same_class(old: HtbClass, want: HtbClass) -> bool:
    if want.classid == INNER_CLASSID:
        # An inner class has no queue to serve: the kernel ignores and reports prio and quantum
        # of the time when it was still a leaf.
        old = replace(old, prio=want.prio, quantum_bytes=want.quantum_bytes)
    return old == want


def _queue_changes(observed: Observed, tree: Tree) -> list[Change]:
    """What makes all qdiscs that are under no HTB class those of the tree."""
    in_classes = {item.classid for item in tree.classes}
    changes: list[Change] = []
    made: set[int] = set()
    for want in tree.queues:
        if want.parent in in_classes:
            continue
        above = want.parent & MAJOR_MASK
        change = _queue_change(None if above in made else observed.leaf_of(want.parent), want)
        made |= {want.handle for item in change if isinstance(item, SetQueue)}
        changes += change
    return changes


def _queue_change(old: Qdisc | None, want: Queue) -> list[Change]:
    if old is None or old.is_kernel_default:
        return [SetQueue(want)]
    if (old.kind, old.handle) != (want.options.kind, want.handle) or old.options is None:
        # The kernel refuses to make a qdisc of another kind under a handle that is in use.
        return [SetQueue(want, replaces=old.kind, clear_first=old.handle == want.handle)]
    return [] if old.options == want.options else [ChangeQueue(old.options, want)]


def same_options(old: Options, want: Options) -> bool:
    """Whether a root is set as wanted; a card may place its traffic classes' queues otherwise."""
    if isinstance(old, Mqprio) and isinstance(want, Mqprio):
        return (old.priomap, len(old.queues)) == (want.priomap, len(want.queues))
    return old == want


def _stray_classes(observed: Observed, tree: Tree) -> list[Change]:
    wanted = {item.classid for item in tree.classes}
    stray = [item for item in observed.classes if item.classid not in wanted]
    # Deepest first: a class with children cannot be deleted.
    parents = {item.parent for item in stray}
    stray.sort(key=lambda item: item.classid in parents)
    return [DelClass(item.classid) for item in stray]
