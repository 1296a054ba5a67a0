"""The trust of a link's classifier: what attach changes about it, in place, and how back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlsched.errors import ApplyError, HostError, TlschedError
from tlsched.tc.observed import Observed
from tlsched.trust import ANY_LOCAL, describe_change

if TYPE_CHECKING:
    from tlsched.ebpf.trustmaps import HeldTrust


@dataclass(frozen=True, slots=True)
class TrustChange:
    """From the trust that the link has (None: none is known) to the one that it should have.

    ``program_id`` is the loaded classifier whose maps are to be changed, or None when a new one
    that brings its trust along takes its place.
    """

    old: HeldTrust | None
    new: HeldTrust
    program_id: int | None

    def describe(self) -> str:
        """What the change does, in one line."""
        from tlsched.ebpf import trustmaps

        trust, _ = trustmaps.name(self.new)
        if self.old is None:
            return f"trust {trust.describe()}"
        before, _ = trustmaps.name(self.old)
        return describe_change(before, trust)


def planned(before: Observed, wanted: HeldTrust, *, keep_program: bool) -> TrustChange | None:
    """What has to change for the link to go by ``wanted``; None when nothing has.

    ``keep_program`` says that the loaded classifier stays.
    """
    from tlsched.ebpf import trustmaps

    old: HeldTrust | None = None
    program_id = None if before.classifier is None else before.classifier.program_id
    if program_id is not None:
        try:
            old = trustmaps.read(program_id)
        except HostError:
            if keep_program:
                raise
    known = trustmaps.resolve(ANY_LOCAL) if old is None else old
    if known == wanted:
        return None
    return TrustChange(old, wanted, program_id if keep_program else None)


@contextlib.contextmanager
def applied(change: TrustChange | None) -> Iterator[None]:
    """The change made, and made undone when it or what happens meanwhile fails.

    Raises ApplyError when the maps do not keep it, or when undoing fails.
    """
    from tlsched.ebpf import trustmaps

    if change is None or change.program_id is None or change.old is None:
        yield
        return
    try:
        trustmaps.change(change.program_id, change.new)
        if trustmaps.read(change.program_id) != change.new:
            raise ApplyError(
                "the classifier did not keep the trust that was set",
                hint="something else writes its maps: see `bpftool map`",
            )
        yield
    except BaseException as error:
        try:
            trustmaps.change(change.program_id, change.old)
        except TlschedError as second:
            raise ApplyError(
                f"{error}, and undoing the change of trust failed: {second.message}",
                hint="attach the link again",
            ) from error
        raise
