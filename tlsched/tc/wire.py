"""One rtnetlink message of traffic control, built from pyroute2's class (<linux/rtnetlink.h>)."""

from __future__ import annotations

from typing import Any

from pyroute2.netlink import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NLM_F_REQUEST,
)
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tlsched.errors import FeatureMissing
from tlsched.tc import plugins

ADD = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
PUT = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
EDIT = NLM_F_REQUEST | NLM_F_ACK
DUMP = NLM_F_REQUEST | NLM_F_DUMP


def message(
    kind_of: int,
    flags: int,
    ifindex: int,
    handle: int = 0,
    parent: int = 0,
    kind: str | None = None,
    options: dict[str, Any] | None = None,
    info: int = 0,
) -> tcmsg:
    """One request about a link. Raises FeatureMissing for a kind that pyroute2 does not know."""
    built = tcmsg()
    built["header"]["type"] = kind_of
    built["header"]["flags"] = flags
    built["index"], built["handle"] = ifindex, handle
    built["parent"], built["info"] = parent, info
    if kind is not None:
        if not plugins.known(kind):
            raise FeatureMissing(
                f'pyroute2 does not know the kind "{kind}"', hint="use pyroute2 0.9.5 or later"
            )
        built["attrs"].append(("TCA_KIND", kind))
    if options is not None:
        built["attrs"].append(("TCA_OPTIONS", options))
    return built
