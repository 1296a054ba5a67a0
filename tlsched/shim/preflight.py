"""Preflight for NCCL lanes: what the packets travel by, and which variables stand in the way.

Pure functions over an environment and a copy of sysfs. NCCL also reads /etc/nccl.conf and
NCCL_CONF_FILE, which are not looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_SYSFS = Path("/sys/class/infiniband")
_UNSET = ("", "-1")  # NCCL reads -1 of its InfiniBand variables as "not set"


class Wire(StrEnum):
    """What NCCL's packets travel by."""

    TCP = "TCP"
    ROCE = "RoCE"
    INFINIBAND = "InfiniBand"
    PLUGIN = "a network plugin"


@dataclass(frozen=True, slots=True)
class Finding:
    """An environment variable that stands in the lanes' way; ``remedy`` says what to do."""

    variable: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.variable}: {self.what}; {self.remedy}"


def wire(environ: Mapping[str, str], sysfs: Path = _SYSFS) -> Wire:
    """What NCCL will use, as far as its variables and the host's RDMA ports tell."""
    net = environ.get("NCCL_NET", "").lower()
    if net == "socket":
        return Wire.TCP
    if net not in ("", "ib"):
        return Wire.PLUGIN
    layers = {path.read_text().strip() for path in sysfs.glob("*/ports/*/link_layer")}
    if not layers or (net == "" and environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")):
        return Wire.TCP
    return Wire.INFINIBAND if "InfiniBand" in layers else Wire.ROCE


def preflight(environ: Mapping[str, str], over: Wire, lane_count: int) -> list[Finding]:
    """What of ``environ`` stands in the way of ``lane_count`` lanes over ``over``.

    Sources: NCCL user guide, "Environment Variables" and "Using multiple NCCL communicators
    concurrently".
    """
    found: list[Finding] = []

    def find(variable: str, what: str, remedy: str) -> None:
        found.append(Finding(variable, what, remedy))

    if over in (Wire.ROCE, Wire.INFINIBAND):
        if environ.get("NCCL_IB_TC", "") not in _UNSET:
            find("NCCL_IB_TC", "overrides the traffic class of every lane", "unset it")
        if environ.get("NCCL_IB_SL", "") not in _UNSET:
            find("NCCL_IB_SL", "gives every lane the same service level", "unset it")
    if over is Wire.TCP:
        if environ.get("NCCL_RUNTIME_CONNECT", "1") != "0":
            what = "sockets that NCCL opens after the lanes' first use stay unmarked"
            find("NCCL_RUNTIME_CONNECT", what, "set it to 0, so that all are opened at once")
        if not environ.get("NCCL_SOCKET_IFNAME"):
            what = "is not set, so NCCL takes the interfaces that it likes"
            find("NCCL_SOCKET_IFNAME", what, "set it to the interface that tlsched is attached to")
    if over is Wire.PLUGIN:
        what = f"{environ['NCCL_NET']} decides by itself what a traffic class means"
        find("NCCL_NET", what, "see its documentation, or use NCCL_NET=IB or NCCL_NET=Socket")
    if lane_count > 1 and environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") in ("", "0"):
        what = "is not set, and several communicators on one GPU may block each other"
        find("NCCL_LAUNCH_ORDER_IMPLICIT", what, "set it to 1 (NCCL 2.26 and newer)")
    return found
