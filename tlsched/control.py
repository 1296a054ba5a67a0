"""Attach a link, detach it: lock, read, plan, apply, read again and compare, or undo.

Nothing stays behind but the qdiscs and the filter, which holds its program; no file says what
was done. :func:`status`, in :mod:`tlsched.linkstatus`, reads all of it back from the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tlsched import linktrust
from tlsched.bands import Band
from tlsched.config import LinkSettings, check_iface
from tlsched.errors import (
    ApplyError,
    HostError,
    InterfaceMissing,
    TlschedError,
)
from tlsched.linkclassifier import prepared
from tlsched.linkstatus import LinkStatus, marks_match, status
from tlsched.tc import diff
from tlsched.tc.changes import Change, SetFilter
from tlsched.tc.choice import choose, tree_for
from tlsched.tc.implied import bands_for
from tlsched.tc.kernel import Kernel, interface_index
from tlsched.tc.lock import interface_lock
from tlsched.tc.observed import Observed
from tlsched.tc.probe import probe
from tlsched.tc.refuse import refuse_device, refuse_foreign
from tlsched.tc.tree import Tree
from tlsched.tc.u32 import Match
from tlsched.tc.undo import undo_changes

if TYPE_CHECKING:
    from tlsched.ebpf.program import Classifier
    from tlsched.ebpf.trustmaps import HeldTrust

__all__ = ["LinkStatus", "Outcome", "attach", "detach", "status"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What attach or detach did, or in a dry run would do.

    ``result`` is "attached", "changed", "unchanged" or "detached"; ``changes`` the lines of the
    changes in their order, none when nothing was to do.
    """

    iface: str
    result: str
    changes: tuple[str, ...]
    dry_run: bool
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The outcome as the command line prints it with --json."""
        return {**asdict(self), "changes": list(self.changes), "notes": list(self.notes)}


def attach(settings: LinkSettings, *, dry_run: bool = False, replace_root: bool = False) -> Outcome:
    """Make the link what ``settings`` say. Does nothing when it is so already.

    A root qdisc that somebody configured is refused unless ``replace_root``; it cannot be
    restored later. Raises HostError and its kin before anything is changed, and ApplyError
    when a change failed; then what had been changed is undone.
    """
    from tlsched.ebpf import trustmaps  # detach and status need no compiler

    trust = trustmaps.resolve(settings.trust)
    with Kernel() as kernel, _lock(settings.iface, dry_run):
        before = kernel.read(settings.iface)
        device = kernel.device(before.ifindex)
        refuse_device(device)
        refuse_foreign(before, replace_root)
        choice = choose(settings, device, probe)
        bands = bands_for(choice.kind, settings.bands)
        tree = tree_for(choice, device, bands)
        ethernet = device.has_ethernet_header
        with prepared(settings, bands, trust, tree.kind, ethernet=ethernet) as classifier:
            program = classifier.program
            keep = program is not None and _can_stay(before, program, bands, trust)
            goal = _Goal(tree, program, classifier.matches)
            changes = diff.attach_changes(before, tree, keep_program=keep, u32=goal.u32)
            retrust = linktrust.planned(before, trust, keep_program=keep)
            lines = [] if retrust is None else [retrust.describe()]
            if not dry_run:
                with linktrust.applied(retrust):
                    _carry_out(kernel, before, changes, goal)
            result = "changed" if before.carries_ours else "attached"
            result = result if changes or retrust else "unchanged"
            lines += [change.describe() for change in changes]
            notes = (*choice.notes, *classifier.notes)
            return Outcome(settings.iface, result, tuple(lines), dry_run, notes)


def detach(iface: str, *, dry_run: bool = False) -> Outcome:
    """Remove all that is tlsched's from the interface, and nothing else.

    Does nothing where nothing is ours. The kernel's default qdisc returns, whatever was there
    before attach. Raises HostError and its kin, or ApplyError as :func:`attach` does.
    """
    check_iface(iface)
    with Kernel() as kernel, _lock(iface, dry_run):
        before = kernel.read(iface)
        changes = diff.detach_changes(before)
        if not dry_run:
            _carry_out(kernel, before, changes, _Goal())
        return _outcome(iface, "detached" if changes else "unchanged", changes, dry_run)


def _outcome(iface: str, result: str, changes: list[Change], dry_run: bool) -> Outcome:
    return Outcome(iface, result, tuple(change.describe() for change in changes), dry_run)


@contextlib.contextmanager
def _lock(iface: str, dry_run: bool) -> Iterator[None]:
    if dry_run:
        yield
        return
    ifindex = interface_index(iface)
    with interface_lock(ifindex, iface):
        if interface_index(iface) != ifindex:
            raise InterfaceMissing(
                f"{iface} became another interface meanwhile", hint="try again when it is settled"
            )
        yield


def _can_stay(
    before: Observed, classifier: Classifier, bands: Sequence[Band], trust: HeldTrust
) -> bool:
    """Whether the link's classifier is this version's, with these marks, and can take the trust."""
    from tlsched.ebpf import trustmaps

    ours = before.classifier
    if ours is None or ours.program_id is None or ours.tag != classifier.tag:
        return False
    return marks_match(ours.program_id, bands) and trustmaps.has_room(ours.program_id, trust)


@dataclass(frozen=True, slots=True)
class _Goal:
    """What the link should have after the changes; nothing of ours by default."""

    tree: Tree | None = None
    program: Classifier | None = None
    u32: tuple[Match, ...] = ()


def _carry_out(kernel: Kernel, before: Observed, changes: list[Change], goal: _Goal) -> None:
    """Apply the changes and check that they took effect; undo them when anything fails."""
    if not changes:
        return
    fd = None if goal.program is None else goal.program.fd
    with _hold_program(before) as old_fd:
        try:
            for change in changes:
                kernel.apply(change, before, fd)
            _verify(kernel.reread(before), goal, _expected_program(before, changes, goal.program))
        except BaseException as error:
            _undo(kernel, before, old_fd, error)
            raise


def _expected_program(
    before: Observed, changes: list[Change], classifier: Classifier | None
) -> int | None:
    """The id of the program that the link should go by after the changes."""
    if any(isinstance(change, SetFilter) for change in changes):
        return None if classifier is None else classifier.program_id
    return None if before.classifier is None else before.classifier.program_id


def _verify(after: Observed, goal: _Goal, program_id: int | None) -> None:
    """Raise ApplyError unless the link now has what was asked for."""
    if goal.tree is None:
        left = diff.detach_changes(after)
    else:
        keep = after.classifier is not None and after.classifier.program_id == program_id
        left = diff.attach_changes(after, goal.tree, keep_program=keep, u32=goal.u32)
    if left:
        raise ApplyError(
            f"{after.iface} did not keep what was set, still to do: {left[0].describe()}",
            hint="something else manages this link (NetworkManager, networkd, another tool)",
        )


def _undo(kernel: Kernel, before: Observed, old_fd: int | None, error: BaseException) -> None:
    """Bring the link back to ``before``. Raises ApplyError when that is not possible."""
    try:
        now = kernel.reread(before)
    except HostError:
        return  # the interface is gone, and all that was on it
    changes = undo_changes(before, now)
    lost = old_fd is None and any(isinstance(change, SetFilter) for change in changes)
    if lost:
        changes = [change for change in changes if not isinstance(change, SetFilter)]
    try:
        for change in changes:
            kernel.apply(change, now, old_fd)
    except TlschedError as second:
        raise ApplyError(
            f"{error}, and undoing failed: {second.message}",
            hint=f"run `tlsched detach --iface {now.iface}`",
        ) from error
    if lost:
        raise ApplyError(
            f"{error}; undone, but the classifier that was there could not be put back",
            hint="attach again; keeping hold of a program needs CAP_SYS_ADMIN",
        ) from error
    if before.root is not None and before.has_foreign_root and not now.has_foreign_root:
        raise ApplyError(
            f"{error}; undone, but the root qdisc {before.root.kind} cannot be restored",
            hint="configure it again",
        ) from error


@contextlib.contextmanager
def _hold_program(before: Observed) -> Iterator[int | None]:
    """A descriptor of the classifier on the link, so that undoing can put it back."""
    ours = before.classifier
    if ours is None or ours.program_id is None:
        yield None
        return
    from tlsched.ebpf import libbpf

    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(libbpf.program_by_id(ours.program_id))
        except HostError:  # without CAP_SYS_ADMIN it cannot be put back
            fd = None
        yield fd
