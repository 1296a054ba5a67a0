"""Kinds that pyroute2 lacks or decodes only in part, in the form of its plugins.

A kind that pyroute2 does not know would be moved to the root by its ``tc()`` call; ours do not go
through that, and :func:`known` is asked first.
"""

from __future__ import annotations

from types import SimpleNamespace

from pyroute2.netlink import NLA_F_NESTED, nla, nlmsg
from pyroute2.netlink.rtnl.tcmsg import cls_u32, plugins, sched_bpf
from pyroute2.netlink.rtnl.tcmsg.common_act import tca_act_prio


class _Bfifo(nla):  # type: ignore[misc]  # pyroute2 ships no types
    """struct tc_fifo_qopt."""

    fields = (("limit", "I"),)


class _Mqprio(nla):  # type: ignore[misc]  # pyroute2 ships no types
    """struct tc_mqprio_qopt; further attributes may follow it and are left alone."""

    fields = (
        ("num_tc", "B"),
        ("prio_tc_map", "16B"),
        ("hw", "B"),
        ("count", "16H"),
        ("offset", "16H"),
    )


class _Ets(nla):  # type: ignore[misc]  # pyroute2 ships no types
    """The attributes of ets (TCA_ETS_NBANDS and so on); it insists on the flag of nested ones."""

    nla_flags = NLA_F_NESTED
    nla_map = (
        ("TCA_ETS_UNSPEC", "none"),
        ("TCA_ETS_NBANDS", "uint8"),
        ("TCA_ETS_NSTRICT", "uint8"),
        ("TCA_ETS_QUANTA", "quanta"),
        ("TCA_ETS_QUANTA_BAND", "uint32"),
        ("TCA_ETS_PRIOMAP", "priomap"),
        ("TCA_ETS_PRIOMAP_BAND", "uint8"),
    )

    class quanta(nla):  # type: ignore[misc]  # noqa: N801  # named as in nla_map
        """One attribute a band, in its order."""

        nla_flags = NLA_F_NESTED
        nla_map = ((4, "TCA_ETS_QUANTA_BAND", "uint32"),)

    class priomap(nla):  # type: ignore[misc]  # noqa: N801  # named as in nla_map
        """One attribute a priority, in its order."""

        nla_flags = NLA_F_NESTED
        nla_map = ((6, "TCA_ETS_PRIOMAP_BAND", "uint8"),)


class _Nothing(nla):  # type: ignore[misc]  # pyroute2 ships no types
    """No options at all (mq)."""


class _Bpf(sched_bpf.options):  # type: ignore[misc]  # pyroute2 ships no types
    """A bpf filter's options, with the last three that pyroute2 leaves out."""

    nla_map = (
        *sched_bpf.options.nla_map,
        ("TCA_BPF_FLAGS_GEN", "uint32"),
        ("TCA_BPF_TAG", "cdata"),
        ("TCA_BPF_ID", "uint32"),
    )


class _U32(cls_u32.options):  # type: ignore[misc]  # pyroute2 ships no types
    """A u32 filter's options with its selector as bytes: pyroute2 reads keys four bytes early."""

    nla_map = tuple(
        (name, "cdata" if name == "TCA_U32_SEL" else form) for name, form in cls_u32.options.nla_map
    )


class ActionMessage(nlmsg):  # type: ignore[misc]  # pyroute2 ships no types
    """struct tcamsg, with the actions that a request is about (<linux/rtnetlink.h>)."""

    fields = (("family", "B"), ("pad1", "B"), ("pad2", "H"))
    nla_map = (("TCA_ROOT_UNSPEC", "none"), ("TCA_ROOT_TAB", "tca_act_prio"))
    tca_act_prio = tca_act_prio


_OURS = {"bfifo": _Bfifo, "ets": _Ets, "mq": _Nothing, "mqprio": _Mqprio}


def register() -> None:
    """Teach pyroute2 the kinds it lacks, and to decode a filter's program id and tag."""
    for kind, options in _OURS.items():
        plugins.setdefault(kind, SimpleNamespace(options=options))
    plugins["u32"] = SimpleNamespace(**{**vars(cls_u32), "options": _U32})
    plugins["bpf"] = SimpleNamespace(**{**vars(sched_bpf), "options": _Bpf})


def known(kind: str) -> bool:
    """Whether pyroute2 has a plugin for ``kind``."""
    return kind in plugins
