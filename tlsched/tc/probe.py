"""What the kernel can do, asked by trying.

A qdisc is created without the options that it needs, or where it cannot be. A kernel that has the
kind says what is wrong; one that lacks it says ENOENT before it looks any further (qdisc_create
in net/sched/sch_api.c). So nothing comes to be; and asking loads the module, if there is one.
Filters are only looked up where a qdisc holds them, so these are made for real, in a network
namespace of its own that goes with the thread. Where CAP_SYS_ADMIN is missing there is none:
the qdiscs are then asked on the loopback device, and the filters are taken to be there.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from dataclasses import dataclass, fields

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from tlsched.errors import PermissionMissing
from tlsched.tc import messages, plugins

CLONE_NEWNET = 0x40000000  # <sched.h>
# What is made for real; clsact holds the filters.
_IN_A_NAMESPACE = ("bfifo", "clsact", "bpf", "u32")


@dataclass(frozen=True, slots=True)
class KernelFeatures:
    """Which kinds the kernel has: qdiscs, then filters (``bpf``, ``u32``), then ``skbedit``."""

    htb: bool
    ets: bool
    prio: bool
    mq: bool
    mqprio: bool
    bfifo: bool
    clsact: bool
    bpf: bool
    u32: bool
    skbedit: bool


def probe() -> KernelFeatures:
    """Ask the running kernel. Raises PermissionMissing without CAP_NET_ADMIN."""
    found: dict[str, bool] = {}
    failed: list[BaseException] = []

    def inside() -> None:
        # A namespace belongs to a thread (unshare(2)) and goes with it.
        alone = ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
        try:
            plugins.register()
            with IPRoute(ext_ack=True) as sock:
                for item in fields(KernelFeatures):
                    kind = item.name
                    found[kind] = (kind in _IN_A_NAMESPACE and not alone) or _has(sock, kind)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=inside, name="tlsched-probe")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return KernelFeatures(**found)


def _has(sock: IPRoute, kind: str) -> bool:
    try:
        sock.nlm_request_batch(messages.trial(kind))
    except NetlinkError as error:
        if error.code in (errno.EPERM, errno.EACCES):
            raise PermissionMissing(
                "no permission to ask the kernel what it can do: CAP_NET_ADMIN is missing",
                hint="run as root, or give the process CAP_NET_ADMIN",
            ) from error
        return bool(error.code != errno.ENOENT)
    return True
