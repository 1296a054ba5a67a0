"""Observed against desired: the changes that lead from one to the other. Pure.

An empty list means that nothing is written. Whatever exists is changed in place, so a tree
that carries traffic loses no packet when its settings change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tlsched.bands import DEFAULT_DSCPS, Band, all_bands
from tlsched.config import MAX_RATE_BPS
from tlsched.tc.changes import (
    AddClass,
    AddRoot,
    Change,
    ChangeClass,
    ChangeLeaf,
    DelClass,
    DelClsact,
    DelFilter,
    DelRoot,
    SetFilter,
    SetLeaf,
)
from tlsched.tc.observed import (
    FILTER_HANDLE,
    FILTER_PRIO,
    NAME_GUEST,
    NAME_OWNER,
    Filter,
    Observed,
    Qdisc,
)
from tlsched.tc.tree import INNER_CLASSID, HtbClass, Leaf, Tree, desired_tree

OPEN_BPS = MAX_RATE_BPS


def attach_changes(observed: Observed, tree: Tree, *, keep_program: bool) -> list[Change]:
    """What leads from ``observed`` to ``tree`` plus classifier.

    ``keep_program`` says that the classifier that is there, if any, is the right one. Whether a
    foreign root may be replaced was decided before.
    """
    # Adding clsact stops the device for a moment and empties its queues (qdisc_graft calls
    # dev_deactivate): milliseconds under a busy HTB, next to nothing before it.
    return [*_classifier_changes(observed, keep_program), *tree_changes(observed, tree)]


def detach_changes(observed: Observed) -> list[Change]:
    """What removes everything of ours from ``observed``, and nothing else."""
    changes: list[Change] = []
    if observed.has_our_root and observed.root is not None:
        changes.append(DelRoot(observed.root.kind, observed.root.handle))
    ours = observed.classifier
    if observed.owns_clsact and all(item.is_ours for item in observed.filters):
        changes.append(DelClsact())  # and the filter with it
    elif ours is not None:
        changes.append(DelFilter(str(ours.name), ours.prio, ours.handle))
    return changes


def undo_changes(before: Observed, now: Observed) -> list[Change]:
    """What leads from ``now``, left by a failed attach or detach, back to ``before``.

    A root of somebody else's that is gone is gone. SetFilter in the result means the program
    that the link had before.
    """
    changes: list[Change] = []
    if before.has_our_root:
        # Filters at the root are not ours to delete when nothing is to change.
        changes += tree_changes(replace(now, root_filters=()), _tree_as_it_was(before))
    elif now.has_our_root and now.root is not None:
        changes.append(DelRoot(now.root.kind, now.root.handle))
    return [*changes, *_undo_classifier(before, now)]


def _tree_as_it_was(before: Observed) -> Tree:
    assert before.root is not None
    classes = sorted(before.classes, key=lambda item: (item.classid != INNER_CLASSID, item.classid))
    leaves = tuple(
        Leaf(queue.handle, queue.parent, queue.limit_bytes)
        for queue in before.qdiscs
        if queue.limit_bytes is not None and queue.parent & 0xFFFF0000 == before.root.handle
    )
    return Tree(before.root.handle, before.root.default_minor or 0, tuple(classes), leaves)


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


def implied_tree(observed: Observed) -> Tree | None:
    """The tree that ``observed`` was attached as, or None when too little of it is left.

    There is no state file: the rate is what most classes have as their ceil, the guaranteed
    share is the default class's own rate, and all else follows from these two.
    """
    if not observed.has_our_root or not observed.classes:
        return None
    bands = all_bands(DEFAULT_DSCPS)  # the tree does not depend on the code points
    rate_bps, _ = Counter(item.ceil_bps for item in observed.classes).most_common(1)[0]
    default = _class_of(observed, bands[-1])
    share_bps = default.rate_bps if default else rate_bps
    return desired_tree(rate_bps, share_bps, bands)


def _class_of(observed: Observed, band: Band) -> HtbClass | None:
    return next((item for item in observed.classes if item.classid == band.classid), None)


def tree_changes(observed: Observed, tree: Tree) -> list[Change]:
    """What makes the root qdisc and all below it the ``tree``."""
    root = observed.root
    if root is not None and _can_be_mended(observed, root, tree):
        return [*_class_changes(observed, tree), *_stray_classes(observed, tree)]
    changes: list[Change] = []
    if root is not None and root.handle == tree.handle:
        # HTB cannot change its default class or a class's parent, a handle not its kind.
        changes.append(DelRoot(root.kind, root.handle))
        root = None
    kind = None if root is None else root.kind
    foreign = root is not None and not root.is_kernel_default
    changes.append(AddRoot(tree.handle, tree.default_minor, kind, foreign))
    bare = replace(observed, qdiscs=(), classes=())
    return [*changes, *_class_changes(bare, tree)]


def _can_be_mended(observed: Observed, root: Qdisc, tree: Tree) -> bool:
    """Whether the root is ours and what cannot be changed in place is right.

    Filters at our root go with it: to delete one takes its chain's number, which a dump by
    pyroute2 lacks.
    """
    if observed.root_filters:
        return False
    if not observed.has_our_root or root.default_minor != tree.default_minor:
        return False
    parents = {item.classid: item.parent for item in tree.classes}
    return all(parents.get(item.classid, item.parent) == item.parent for item in observed.classes)


def _class_changes(observed: Observed, tree: Tree) -> list[Change]:
    have = {item.classid: item for item in observed.classes}
    leaves = {leaf.parent: leaf for leaf in tree.leaves}
    changes: list[Change] = []
    for want in tree.classes:
        leaf = leaves.get(want.classid)
        old = have.get(want.classid)
        if old is not None:
            if not _same_class(old, want):
                changes.append(ChangeClass(old, want))
            changes += _leaf_changes(observed.leaf_of(want.classid), leaf) if leaf else []
        elif leaf is None:
            changes.append(AddClass(want))
        else:
            opened = replace(want, rate_bps=OPEN_BPS, ceil_bps=OPEN_BPS)
            changes += [AddClass(opened), SetLeaf(leaf), ChangeClass(opened, want)]
    return changes


def _same_class(old: HtbClass, want: HtbClass) -> bool:
    if want.classid == INNER_CLASSID:
        # An inner class has no queue to serve: the kernel ignores and reports prio and quantum
        # of the time when it was still a leaf.
        old = replace(old, prio=want.prio, quantum_bytes=want.quantum_bytes)
    return old == want


def _leaf_changes(old: Qdisc | None, leaf: Leaf) -> list[Change]:
    if old is None:
        return [SetLeaf(leaf)]
    if (old.kind, old.handle) != (leaf.kind, leaf.handle):
        # The kernel refuses to make a qdisc of another kind under a handle that is in use.
        return [SetLeaf(leaf, replaces=old.kind, clear_first=old.handle == leaf.handle)]
    if old.limit_bytes != leaf.limit_bytes:
        return [ChangeLeaf(old.limit_bytes or 0, leaf)]
    return []


def _stray_classes(observed: Observed, tree: Tree) -> list[Change]:
    wanted = {item.classid for item in tree.classes}
    stray = [item for item in observed.classes if item.classid not in wanted]
    # Deepest first: a class with children cannot be deleted.
    parents = {item.parent for item in stray}
    stray.sort(key=lambda item: item.classid in parents)
    return [DelClass(item.classid) for item in stray]


def _classifier_changes(observed: Observed, keep_program: bool) -> list[Change]:
    ours: Filter | None = observed.classifier
    if ours is not None:
        if keep_program:
            return []
        return [SetFilter(str(ours.name), ours.prio, ours.handle, ours.program_id)]
    if not observed.has_clsact:
        return [SetFilter(NAME_OWNER, FILTER_PRIO, FILTER_HANDLE, add_clsact=True)]
    name = NAME_OWNER if observed.owns_clsact else NAME_GUEST
    return [SetFilter(name, FILTER_PRIO, FILTER_HANDLE)]
