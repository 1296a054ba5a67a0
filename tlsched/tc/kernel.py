"""The link in the kernel: reads it, and applies changes to it. The only user of pyroute2.

Nothing is decided here. Netlink errors leave as ours, naming the interface and the capability
or the kernel feature that is missing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from types import TracebackType

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import RTM_GETQDISC, RTM_GETTCLASS, RTM_GETTFILTER
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tlsched.bands import ROOT_HANDLE
from tlsched.errors import (
    ApplyError,
    FeatureMissing,
    InterfaceMissing,
    PermissionMissing,
    TlschedError,
)
from tlsched.tc import messages
from tlsched.tc.changes import AddRoot, Change, SetFilter, SetLeaf
from tlsched.tc.observed import EGRESS, INGRESS, Filter, Observed

SIOCGIFHWADDR = 0x8927  # <linux/sockios.h>
ARPHRD_ETHER, ARPHRD_LOOPBACK = 1, 772  # <linux/if_arp.h>

_FEATURES = {
    AddRoot: "the qdisc htb (CONFIG_NET_SCH_HTB)",
    SetLeaf: "the qdisc bfifo (CONFIG_NET_SCHED)",
    SetFilter: "the qdisc clsact or the bpf filter (CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_BPF)",
}


class Kernel:
    """A netlink socket in the calling thread's network namespace. Use as a context manager."""

    def __enter__(self) -> Kernel:
        """Open the socket."""
        messages.register_plugins()
        self._socket = IPRoute(ext_ack=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the socket."""
        self._socket.close()

    def interfaces(self) -> list[str]:
        """Names of all interfaces of the namespace, in the kernel's order."""
        return [name for _, name in socket.if_nameindex()]

    def read(self, iface: str) -> Observed:
        """All that tlsched looks at on ``iface``. InterfaceMissing when there is none."""
        return self._read(iface, interface_index(iface))

    def reread(self, before: Observed) -> Observed:
        """The same interface again, whatever its name is by now. InterfaceMissing if it went."""
        try:
            iface = socket.if_indextoname(before.ifindex)
        except OSError as error:
            raise _disappeared(before.iface) from error
        return self._read(iface, before.ifindex)

    def _read(self, iface: str, ifindex: int) -> Observed:
        try:
            qdiscs = self._dump(RTM_GETQDISC, ifindex)
            classes = self._dump(RTM_GETTCLASS, ifindex)
            found = Observed(
                iface,
                ifindex,
                qdiscs=tuple(messages.qdisc(message) for message in qdiscs),
            )
            if not found.has_our_root:
                classes = []
            return Observed(
                iface,
                ifindex,
                qdiscs=found.qdiscs,
                classes=tuple(messages.htb_class(message) for message in classes),
                class_stats={message["handle"]: messages.stats(message) for message in classes},
                filters=self._filters(ifindex, EGRESS, INGRESS) if found.has_clsact else (),
                root_filters=self._filters(ifindex, ROOT_HANDLE) if found.has_our_root else (),
            )
        except NetlinkError as error:
            raise _explain(error, iface, "read the link") from error

    def apply(self, change: Change, observed: Observed, program_fd: int | None = None) -> None:
        """Apply one change to the interface that ``observed`` was read from.

        ``program_fd`` is the loaded program that SetFilter attaches. Raises PermissionMissing,
        FeatureMissing, InterfaceMissing or ApplyError.
        """
        request = messages.encode(change, observed.ifindex, program_fd)
        # The kernel goes on with a batch after a message that failed. Where clsact could not be
        # added our filter would land on whatever took its place; a leaf's two are one moment.
        apart = isinstance(change, SetFilter)
        try:
            for batch in [[message] for message in request] if apart else [request]:
                self._socket.nlm_request_batch(batch)
        except NetlinkError as error:
            raise _explain(error, observed.iface, change.describe(), change) from error

    def _filters(self, ifindex: int, *parents: int) -> tuple[Filter, ...]:
        found = [
            messages.filter_(message, parent)
            for parent in parents
            for message in self._dump(RTM_GETTFILTER, ifindex, parent)
        ]
        return tuple(item for item in found if item is not None)

    def _dump(self, kind_of: int, ifindex: int, parent: int = 0) -> list[tcmsg]:
        request = messages.dump(kind_of, ifindex, parent)
        # The kernel dumps the qdiscs of all interfaces, whatever is asked (tc_dump_qdisc).
        answers = self._socket.nlm_request_batch([request])
        return [answer for answer in answers if answer["index"] == ifindex]


def interface_index(iface: str) -> int:
    """The number of ``iface`` in the calling thread's namespace; InterfaceMissing without one."""
    try:
        return socket.if_nametoindex(iface)
    except OSError as error:
        raise InterfaceMissing(
            f'there is no interface "{iface}" in this network namespace',
            hint="see `ip link` for the names of this host's interfaces",
        ) from error


def has_ethernet_header(iface: str) -> bool:
    """Whether frames on ``iface`` begin with an Ethernet header (netdevice(7), SIOCGIFHWADDR).

    Raises InterfaceMissing without such an interface in the calling thread's namespace.
    """
    request = struct.pack("16s24x", iface.encode())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, SIOCGIFHWADDR, request)
        except OSError as error:
            raise _disappeared(iface) from error
    (kind,) = struct.unpack_from("H", answer, 16)
    return kind in (ARPHRD_ETHER, ARPHRD_LOOPBACK)


def _disappeared(iface: str) -> InterfaceMissing:
    return InterfaceMissing(f"interface {iface} disappeared", hint="try again when it is back")


def _explain(
    error: NetlinkError, iface: str, doing: str, change: Change | None = None
) -> TlschedError:
    """The error of ours that says what a netlink error means here."""
    if error.code in (errno.EPERM, errno.EACCES):
        return PermissionMissing(
            f"no permission to change {iface}: CAP_NET_ADMIN is missing",
            hint="run as root, or give the process CAP_NET_ADMIN",
        )
    if error.code == errno.ENODEV:
        return _disappeared(iface)
    feature = _FEATURES.get(type(change)) if change is not None else None
    if error.code in (errno.ENOENT, errno.EOPNOTSUPP) and feature:
        return FeatureMissing(
            f"the kernel lacks {feature}", hint="load the module or use a kernel that has it"
        )
    return ApplyError(
        f"{iface}: could not {doing}: {os.strerror(error.code)}",
        hint="run `tlsched status` to see what the link has",
    )
