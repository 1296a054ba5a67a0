"""Observed against desired: which changes, in which order, and none where none is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tlsched.bands import ROOT_HANDLE
from tlsched.config import LinkSettings, share_bps
from tlsched.tc import changes as ch
from tlsched.tc import diff
from tlsched.tc.implied import implied_tree
from tlsched.tc.observed import EGRESS, INGRESS, NAME_GUEST, NAME_OWNER, Filter, Observed, Qdisc
from tlsched.tc.options import Htb
from tlsched.tc.tree import INNER_CLASSID, ROOT_PARENT, Tree, desired_tree
from tlsched.tc.undo import undo_changes

CLSACT = Qdisc("clsact", 0xFFFF0000, 0xFFFFFFF1)
KERNELS = Qdisc("pfifo_fast", 0, ROOT_PARENT)
OURS = Filter(EGRESS, "bpf", 0x7150, 1, NAME_OWNER, program_id=7, tag="00")


def tree_of(rate_bps: int = 10**9, share: float = 0.05) -> Tree:
    settings = LinkSettings("eth0", rate_bps, default_share=share)
    return desired_tree(rate_bps, share_bps(rate_bps, share), settings.bands)


def attached(tree: Tree, *filters: Filter) -> Observed:
    root = Qdisc(tree.kind, tree.handle, ROOT_PARENT, tree.root)
    queues = [Qdisc(q.options.kind, q.handle, q.parent, q.options) for q in tree.queues]
    return Observed(
        "eth0",
        2,
        qdiscs=(root, CLSACT, *queues),
        classes=tree.classes[::-1],  # the kernel's order is its own
        filters=filters or (OURS,),
    )


def plan(observed: Observed, tree: Tree, keep: bool = True) -> list[ch.Change]:
    return diff.attach_changes(observed, tree, keep_program=keep)


def test_nothing_to_do_writes_nothing() -> None:
    assert plan(attached(tree_of()), tree_of()) == []


def test_a_fresh_link_gets_the_classifier_before_the_tree() -> None:
    first, second, *rest = plan(Observed("eth0", 2, (KERNELS,)), tree_of())
    assert isinstance(first, ch.SetFilter)
    assert (first.add_clsact, first.name) == (True, NAME_OWNER)
    assert second == ch.AddRoot(ROOT_HANDLE, Htb(0x16), "pfifo_fast", foreign=False)
    assert len([change for change in rest if isinstance(change, ch.SetQueue)]) == 7


def test_a_band_gets_its_limit_only_after_its_queue() -> None:
    changes = plan(Observed("eth0", 2, (KERNELS,)), tree_of())
    for number, change in enumerate(changes):
        if isinstance(change, ch.AddClass) and change.new.classid != INNER_CLASSID:
            assert change.new.ceil_bps > 10**11
            assert isinstance(changes[number + 1], ch.SetQueue)
            assert isinstance(changes[number + 2], ch.ChangeClass)


def test_other_settings_are_changed_in_place() -> None:
    changes = plan(attached(tree_of()), tree_of(2 * 10**9, share=0.1))
    assert changes
    assert all(isinstance(change, ch.ChangeClass | ch.ChangeQueue) for change in changes)


def test_another_program_is_replaced_in_one_step() -> None:
    assert plan(attached(tree_of()), tree_of(), keep=False) == [
        ch.SetFilter(NAME_OWNER, OURS.prio, OURS.handle, replaces_program=7)
    ]


def test_strays_go_children_first() -> None:
    seen = attached(tree_of())
    parent = replace(tree_of().classes[1], classid=ROOT_HANDLE | 0x50)
    child = replace(parent, classid=ROOT_HANDLE | 0x51, parent=parent.classid)
    strays = replace(seen, classes=(*seen.classes, parent, child))
    assert plan(strays, tree_of()) == [ch.DelClass(child.classid), ch.DelClass(parent.classid)]


def test_a_tree_that_cannot_be_mended_is_built_again() -> None:
    seen = attached(tree_of())
    wrong = [replace(q, options=Htb(0x10)) if q.kind == "htb" else q for q in seen.qdiscs]
    first, second, *_ = plan(replace(seen, qdiscs=tuple(wrong)), tree_of())
    assert isinstance(first, ch.DelRoot)
    assert isinstance(second, ch.AddRoot)


def test_a_tree_in_which_a_handle_of_ours_stands_elsewhere_is_built_again() -> None:
    tree = tree_of()
    link = attached(tree)
    first, second = (queue for queue in link.qdiscs if queue.handle in (0x71600000, 0x71610000))
    moved = replace(first, parent=second.parent)
    others = tuple(queue for queue in link.qdiscs if queue not in (first, second))
    changes = plan(replace(link, qdiscs=(*others, moved)), tree)
    assert [type(change) for change in changes[:2]] == [ch.DelRoot, ch.AddRoot]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ((OURS,), [ch.DelRoot, ch.DelClsact]),
        ((replace(OURS, name=NAME_GUEST),), [ch.DelRoot, ch.DelFilter]),
        ((OURS, Filter(EGRESS, "bpf", 1, 1, "theirs")), [ch.DelRoot, ch.DelFilter]),
        ((OURS, Filter(INGRESS, "u32", 1, 1)), [ch.DelRoot, ch.DelFilter]),
        ((Filter(EGRESS, "bpf", 1, 1, "theirs"),), [ch.DelRoot]),
    ],
)
def test_detach_leaves_what_is_not_ours(
    filters: tuple[Filter, ...], expected: list[type[ch.Change]]
) -> None:
    changes = diff.detach_changes(attached(tree_of(), *filters))
    assert [type(change) for change in changes] == expected


def test_detach_of_a_link_that_is_not_attached() -> None:
    for qdiscs in ((), (KERNELS,), (KERNELS, CLSACT), (Qdisc("tbf", 1 << 16, ROOT_PARENT),)):
        assert diff.detach_changes(Observed("eth0", 2, qdiscs)) == []


def test_the_tree_follows_from_what_is_observed() -> None:
    for tree in (tree_of(), tree_of(10**10, 0.2), tree_of(4 * 10**11)):
        assert implied_tree(attached(tree)) == tree


def test_undo_leads_back() -> None:
    old, new = attached(tree_of()), attached(tree_of(2 * 10**9))
    assert undo_changes(old, old) == []
    undone = undo_changes(old, new)
    assert undone == diff.tree_changes(new, tree_of())
    bare = Observed("eth0", 2, (KERNELS,))
    assert [type(change) for change in undo_changes(bare, new)] == [ch.DelRoot, ch.DelClsact]


def test_every_change_describes_itself_in_one_line() -> None:
    fresh = plan(Observed("eth0", 2, (KERNELS,)), tree_of())
    changed = plan(attached(tree_of()), tree_of(2 * 10**9))
    removed = diff.detach_changes(attached(tree_of()))
    lines = [change.describe() for change in (*fresh, *changed, *removed)]
    assert all(line and "\n" not in line for line in lines)
    assert "change class 7150:10 (lane0): ceil 1gbit -> 2gbit" in lines
