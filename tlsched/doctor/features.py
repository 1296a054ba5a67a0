"""Which of the kernel's qdiscs and filters are there, tried in a throw-away namespace."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.doctor.finding import Finding, Level, of_error
from tlsched.errors import PermissionMissing
from tlsched.tc.probe import KernelFeatures, probe

# Without any of these attach cannot do anything at all.
_NEEDED = {
    "bfifo": "CONFIG_NET_SCHED",
    "clsact": "CONFIG_NET_SCH_INGRESS",
}


def findings() -> Iterator[Finding]:
    """What is there, and what the missing ones mean."""
    try:
        features = probe()
    except PermissionMissing as error:
        yield of_error("note", error)
        return
    yield from judge(features)


def judge(features: KernelFeatures) -> Iterator[Finding]:
    """The findings for a kernel with these features. Pure."""
    for kind, option in _NEEDED.items():
        if not getattr(features, kind):
            yield _lacks("blocker", f"the qdisc {kind}", option)
    strict = features.ets or features.prio
    if not features.htb and not strict:
        yield _lacks("blocker", "all of the qdiscs htb, ets and prio", "CONFIG_NET_SCH_HTB")
    elif not features.htb:
        yield _lacks("warning", "the qdisc htb, so no link can have a --rate", "CONFIG_NET_SCH_HTB")
    elif not strict:
        what = "the qdiscs ets and prio, so each link is shaped to a rate"
        yield _lacks("note", what, "CONFIG_NET_SCH_ETS")
    if not features.bpf:
        level: Level = "warning" if features.u32 else "blocker"
        yield _lacks(level, "the bpf filter", "CONFIG_NET_CLS_BPF")
    kinds = ("htb", "ets", "prio", "mq", "mqprio", "clsact", "bpf", "u32")
    there = [kind for kind in kinds if getattr(features, kind)]
    yield Finding("ok", f"the kernel has {', '.join(there) or 'none of the kinds that matter'}")


def _lacks(level: Level, what: str, option: str) -> Finding:
    return Finding(level, f"the kernel lacks {what}", f"use a kernel that has it ({option})")
