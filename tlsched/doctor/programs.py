"""Whose programs see a packet before the classifier does, and may keep it away from it."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.doctor.finding import Finding
from tlsched.doctor.links import Link
from tlsched.ebpf import tcx
from tlsched.errors import FeatureMissing, HostError, PermissionMissing
from tlsched.tc.observed import EGRESS, FILTER_PRIO, Observed

_CILIUM = "cil_"


def findings(link: Link, observed: Observed) -> Iterator[Finding]:
    """Filters before the classifier's place, and tcx programs, which go before all filters."""
    try:
        names = tcx.egress_programs(link.ifindex)
    except (PermissionMissing, FeatureMissing) as error:
        yield Finding("note", error.message, error.hint, link.iface)
        names = []
    except HostError:  # a program that went while it was asked for its name
        names = []
    for name in names:
        yield _finding(
            link.iface, name, f"the program {name} (tcx)", "cilium config set enable-tcx false"
        )
    for kind, name, prio in _before_ours(observed):
        what = f"the filter {name or kind} (prio {prio})"
        remedy = f"cilium config set bpf-filter-priority {FILTER_PRIO + 1}"
        yield _finding(link.iface, name, what, remedy)


def _before_ours(observed: Observed) -> dict[tuple[str, str, int], None]:
    """Kind, name and prio of each, in their order: one filter may show as several (u32)."""
    there = (item for item in observed.filters if item.parent == EGRESS and not item.is_ours)
    earlier = sorted(
        (item for item in there if item.prio < FILTER_PRIO), key=lambda item: item.prio
    )
    return dict.fromkeys((item.kind, item.name or "", item.prio) for item in earlier)


def _finding(iface: str, name: str, what: str, cilium_remedy: str) -> Finding:
    before = "comes before the classifier, which sees only what it passes on"
    if name.startswith(_CILIUM):
        return Finding("warning", f"Cilium: {what} {before}", cilium_remedy, iface)
    remedy = "let it end with TC_ACT_UNSPEC (or TCX_NEXT) for what it does not decide"
    return Finding("note", f"{what} {before}", remedy, iface)
