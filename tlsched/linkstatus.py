"""What a link does, read from the kernel: attached, detached or drifted, and its counters."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tlsched.bands import DEFAULT_BAND, DEFAULT_DSCPS, ROOT_HANDLE, Band, all_bands
from tlsched.config import check_iface
from tlsched.errors import (
    ConfigError,
    HostError,
    InterfaceMissing,
    PermissionMissing,
    ProgramMissing,
)
from tlsched.linkclassifier import DSCP_ALONE
from tlsched.tc import classifying, diff, u32
from tlsched.tc.changes import show
from tlsched.tc.choice import UNGUARDED
from tlsched.tc.classifying import matches_of
from tlsched.tc.drift import ABSENT, Drift, of_changes
from tlsched.tc.implied import bands_for, guaranteed_share, implied_tree
from tlsched.tc.kernel import Kernel
from tlsched.tc.lock import interface_lock
from tlsched.tc.observed import Observed
from tlsched.tc.options import Htb
from tlsched.tc.tree import Tree
from tlsched.trust import Trust

if TYPE_CHECKING:
    from tlsched.ebpf.maps import Counters

State = Literal["attached", "detached", "drifted"]
SETTLE_S = 2.0  # an attach in place takes milliseconds, one on a busy machine more


@dataclass(frozen=True, slots=True)
class BandStatus:
    """A band's marks and traffic: what the classifier counted, what waits, what was dropped."""

    name: str
    priority: int | None
    dscp: int | None
    packets: int
    bytes: int
    backlog_bytes: int
    drops: int


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The state of one interface.

    ``rate_bps`` in bit/s and ``classifier`` ("bpf", "u32") are None where there is none; ``qdisc``
    is the kind of the root. ``drift`` says what differs from what attach set up.
    ``default_share`` is the part of the link that the default band is guaranteed, None where no
    tree says so.
    ``trust`` is who may use the lanes, ``refused`` what bore a lane's DSCP without being trusted,
    lost it and went to the default band (which counted it too); both are None without classifier.
    ``notes`` say what else the administrator should know.
    """

    iface: str
    state: State
    rate_bps: int | None
    qdisc: str | None
    classifier: str | None
    bands: tuple[BandStatus, ...]
    drift: tuple[Drift, ...] = ()
    default_share: float | None = None
    trust: Trust | None = None
    refused: Counters | None = None
    notes: tuple[str, ...] = ()

    @property
    def unclassified_share(self) -> float | None:
        """The part of all bytes so far that no lane claimed; None before the first packet."""
        total = sum(band.bytes for band in self.bands)
        default = sum(band.bytes for band in self.bands if band.name == DEFAULT_BAND)
        return default / total if total else None

    def as_dict(self) -> dict[str, Any]:
        """The status as the command line prints it with --json."""
        values = asdict(self)
        values["notes"] = list(self.notes)
        values["bands"] = list(values["bands"])
        values["drift"] = [drift.as_dict() for drift in self.drift]
        if self.trust is not None:
            values["trust"]["any_local"] = self.trust.any_local
        values["unclassified_share"] = self.unclassified_share
        return values


def status(iface: str | None = None) -> list[LinkStatus]:
    """The state of one interface, or of all those that carry something of tlsched's.

    Raises HostError when there is no such interface, PermissionMissing when the classifier's
    counters may not be read (CAP_SYS_ADMIN).
    """
    with Kernel() as kernel:
        if iface is not None:
            check_iface(iface)
            return [_settled(kernel, kernel.read(iface))]
        found = []
        for name in kernel.interfaces():
            with contextlib.suppress(InterfaceMissing):  # gone since it was listed
                observed = kernel.read(name)
                if observed.carries_ours:
                    found.append(_settled(kernel, observed))
        return found


def marks_match(program_id: int, bands: Sequence[Band]) -> bool:
    """Whether a loaded classifier goes by the marks of ``bands``; HostError if it is not ours."""
    from tlsched.ebpf import maps

    read = [(mark.priority, mark.dscp, mark.classid) for mark in maps.read_marks(program_id)]
    return read == [(band.priority, band.dscp, band.classid) for band in bands]


def _settled(kernel: Kernel, observed: Observed) -> LinkStatus:
    """The state of a link; what looks wrong is read again when nobody is changing it.

    A reading takes several system calls, and an attach may come between them.
    """
    with contextlib.suppress(ProgramMissing):
        found = _link_status(observed)
        if found.state != "drifted":
            return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(HostError):  # held for longer, by whomever
            stack.enter_context(interface_lock(observed.ifindex, observed.iface, SETTLE_S))
        return _link_status(kernel.reread(observed))


def _link_status(observed: Observed) -> LinkStatus:
    root_kind = None if observed.root is None else observed.root.kind
    if not observed.carries_ours:
        return LinkStatus(observed.iface, "detached", None, root_kind, None, ())
    bands, counters, drift = _read_classifier(observed)
    trust, refused, trust_drift = _read_trust(observed) if counters else (None, None, [])
    drift += [*trust_drift, *_tree_drift(observed)]
    tree = implied_tree(observed)
    share = None if tree is None else guaranteed_share(tree)
    return LinkStatus(
        iface=observed.iface,
        state="drifted" if drift else "attached",
        rate_bps=tree.classes[0].rate_bps if tree is not None and tree.classes else None,
        qdisc=root_kind,
        classifier=_classifier_kind(observed),
        bands=tuple(_band_status(observed, tree, band, counters) for band in bands),
        drift=tuple(drift),
        default_share=share,
        trust=trust,
        refused=refused,
        notes=((UNGUARDED,) if share == 0 else ()) + ((DSCP_ALONE,) if observed.u32 else ()),
    )


def _read_classifier(
    observed: Observed,
) -> tuple[tuple[Band, ...], Mapping[str, Counters], list[Drift]]:
    """The bands as the classifier knows them, its counters, and what is wrong with it."""
    from tlsched.ebpf import maps

    ours = observed.classifier
    if observed.u32:
        return _read_u32(observed)
    if ours is None or ours.program_id is None:
        return all_bands(), {}, [Drift("classifier at clsact egress", ABSENT, "there")]
    try:
        dscps = [mark.dscp for mark in maps.read_marks(ours.program_id) if mark.dscp is not None]
        bands = bands_for(_root_kind(observed), all_bands(dscps))
        counters = maps.read_counters(ours.program_id)
        good = marks_match(ours.program_id, bands)
    except PermissionMissing:
        raise
    except (HostError, ConfigError) as error:
        wrong = Drift("classifier", f"another program ({error.message})", "tlsched's")
        return all_bands(DEFAULT_DSCPS), {}, [wrong]
    if good:
        return bands, counters, []
    return bands, counters, [Drift("marks in the classifier", "others", "those of six lanes")]


def _read_u32(
    observed: Observed,
) -> tuple[tuple[Band, ...], Mapping[str, Counters], list[Drift]]:
    """The bands as the u32 filters know them, and what is wrong with these; they count nothing."""
    found = matches_of(observed.u32)
    at_htb = classifying.at_htb(found)
    wrong = Drift("u32 filters", "others", "those of six lanes")
    try:
        bands = bands_for(_root_kind(observed), all_bands(u32.lane_dscps(found)))
    except ConfigError:
        return all_bands(), {}, [wrong]
    good = found == u32.matches(bands, at_htb=at_htb) and observed.classifier is None
    return bands, {}, [] if good else [wrong]


def _root_kind(observed: Observed) -> str:
    root = observed.root
    return root.kind if observed.has_our_root and root is not None else Htb.kind


def _classifier_kind(observed: Observed) -> str | None:
    if observed.u32:
        return "u32"
    return None if observed.classifier is None else "bpf"


def _read_trust(observed: Observed) -> tuple[Trust, Counters, list[Drift]]:
    """Whom our classifier trusts, what it refused, and which trusted cgroups are gone."""
    from tlsched.ebpf import maps, trustmaps

    assert observed.classifier is not None
    assert observed.classifier.program_id is not None
    program_id = observed.classifier.program_id
    trust, gone = trustmaps.name(trustmaps.read(program_id))
    # One that is made anew under the same name has another number, and is not trusted.
    lost = [Drift(f"trusted cgroup number {number}", "gone", "there") for number in gone]
    return trust, maps.read_refused(program_id), lost


def _tree_drift(observed: Observed) -> list[Drift]:
    if not observed.has_our_root:
        root = observed.root
        there = ABSENT if root is None else f"{root.kind} {show(root.handle)}"
        return [Drift("root qdisc", there, f"one of tlsched's ({show(ROOT_HANDLE)})")]
    tree = implied_tree(observed)
    if tree is None:
        return [Drift("classes or queues", ABSENT, "one for each band")]
    bare = replace(observed, root_filters=())  # they alone would have the whole tree rebuilt
    kinds = sorted(
        {
            f"{item.kind} prio {item.prio}"
            for item in observed.foreign_root_filters
            if not item.is_table
        }
    )
    past = "there, sending packets past the classifier"
    foreign = [
        Drift(f"filter of somebody else's at the root ({kind})", past, ABSENT) for kind in kinds
    ]
    return [*of_changes(diff.tree_changes(bare, tree)), *foreign]


def _band_status(
    observed: Observed, tree: Tree | None, band: Band, counters: Mapping[str, Counters]
) -> BandStatus:
    # One queue, or one for each transmit queue of the device.
    wanted = [] if tree is None else [q.parent for q in tree.queues if q.band == band.name]
    leaves = [leaf for parent in wanted if (leaf := observed.leaf_of(parent))]
    counted = counters.get(band.name)
    return BandStatus(
        name=band.name,
        priority=band.priority,
        dscp=band.dscp,
        # u32 filters count nothing; what went through the queues is known all the same.
        packets=counted.packets if counted else sum(leaf.stats.packets for leaf in leaves),
        bytes=counted.bytes if counted else sum(leaf.stats.bytes for leaf in leaves),
        backlog_bytes=sum(leaf.stats.backlog_bytes for leaf in leaves),
        drops=sum(leaf.stats.drops for leaf in leaves),
    )
