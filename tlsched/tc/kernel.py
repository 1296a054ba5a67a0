"""The link in the kernel: reads it, and applies changes to it. The only user of pyroute2.

Nothing is decided here. Netlink errors leave as ours, naming the interface and the capability
or the kernel feature that is missing.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import replace
from types import TracebackType

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import RTM_GETQDISC, RTM_GETTCLASS, RTM_GETTFILTER
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tlsched.errors import (
    ApplyError,
    FeatureMissing,
    InterfaceMissing,
    PermissionMissing,
    TlschedError,
)
from tlsched.tc import classifying, decode, messages, plugins
from tlsched.tc.changes import AddRoot, Change, DelClsact, SetFilter, SetQueue, SetU32
from tlsched.tc.device import Device, read_device
from tlsched.tc.observed import EGRESS, INGRESS, Filter, Observed
from tlsched.tc.options import Ets, Htb, Mq, Mqprio, Prio

_CONFIG = {
    "htb": "CONFIG_NET_SCH_HTB",
    "bfifo": "CONFIG_NET_SCH_FIFO",
    "ets": "CONFIG_NET_SCH_ETS",
    "prio": "CONFIG_NET_SCH_PRIO",
    "mq": "CONFIG_NET_SCHED",
    "mqprio": "CONFIG_NET_SCH_MQPRIO",
}
_FILTER = "the qdisc clsact or the bpf filter (CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_BPF)"


_ASKING = (Htb, Ets, Prio)


class Kernel:
    """A netlink socket in the calling thread's network namespace. Use as a context manager."""

    def __enter__(self) -> Kernel:
        """Open the socket."""
        plugins.register()
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
        return self._read_number(interface_index(iface), iface)

    def reread(self, before: Observed) -> Observed:
        """The same interface again, whatever its name is by now. InterfaceMissing if it went."""
        return self._read_number(before.ifindex, before.iface)

    def _read_number(self, ifindex: int, known_as: str) -> Observed:
        try:
            iface = socket.if_indextoname(ifindex)  # ``known_as`` may be an alternative name
        except OSError as error:
            raise _disappeared(known_as) from error
        found = self._read(iface, ifindex)
        # Its name goes first, then all that is on it: half of that would read as somebody's doing.
        if not _is_there(ifindex):
            raise _disappeared(iface)
        return found

    def _read(self, iface: str, ifindex: int) -> Observed:
        try:
            qdiscs = tuple(map(decode.qdisc, self._dump(RTM_GETQDISC, ifindex)))
            classes = self._dump(RTM_GETTCLASS, ifindex)
            root = Observed(iface, ifindex, qdiscs).root
            if root is None or not isinstance(root.options, Htb):
                classes = []
            found = Observed(
                iface,
                ifindex,
                qdiscs,
                classes=tuple(map(decode.htb_class, classes)),
                class_stats={message["handle"]: decode.stats(message) for message in classes},
            )
            ours = found.has_our_root
            is_mq = ours and root is not None and isinstance(root.options, Mq)
            return replace(
                found,
                filters=self._filters(ifindex, EGRESS, INGRESS) if found.has_clsact else (),
                root_filters=self._root_filters(found) if ours else (),
                tx_queues=self.device(ifindex).tx_queues if is_mq else 1,
            )
        except NetlinkError as error:
            raise _explain(error, iface, "read the link") from error

    def device(self, ifindex: int) -> Device:
        """What kind of device an interface is. InterfaceMissing when there is none."""
        try:
            return read_device(self._socket, ifindex)
        except NetlinkError as error:
            raise _explain(error, f"number {ifindex}", "read the device") from error

    def apply(self, change: Change, observed: Observed, program_fd: int | None = None) -> None:
        """Apply one change to the interface that ``observed`` was read from.

        ``program_fd`` is the loaded program that SetFilter attaches. Raises PermissionMissing,
        FeatureMissing, InterfaceMissing or ApplyError.
        """
        if isinstance(change, DelClsact):
            self._delete_clsact(observed)
            return
        # In one system call: a process that is killed has done all of a change or nothing.
        batch = messages.encode(change, observed.ifindex, program_fd)
        try:
            self._send(batch)
        except NetlinkError as error:
            if isinstance(change, SetFilter | SetU32) and change.add_clsact:
                self._take_back(observed.ifindex)
            raise _explain(error, observed.iface, change.describe(), change) from error

    def _delete_clsact(self, observed: Observed) -> None:
        """Delete clsact unless somebody has put a filter into it since; then only ours go.

        The kernel deletes clsact with all that is in it and knows no condition. So it is read
        again right before: a filter of somebody's is lost only if it comes between these two calls.
        """
        try:
            filters = self._filters(observed.ifindex, EGRESS, INGRESS)
            now = replace(observed, filters=filters)
            deletes: list[Change] = [DelClsact()]
            if not all(item.is_ours for item in filters):
                deletes = classifying.remove_filters(now)
            for delete in deletes:
                self._send(messages.encode(delete, observed.ifindex, None))
        except NetlinkError as error:
            raise _explain(error, observed.iface, DelClsact().describe()) from error

    def _send(self, batch: list[tcmsg]) -> None:
        self._socket.nlm_request_batch(batch)

    def _take_back(self, ifindex: int) -> None:
        """Remove our filter from what stood in clsact's place.

        The kernel goes on with a batch after a message that failed, so where clsact could not be
        added the filter landed on somebody's "ingress".
        """
        found = Observed("", ifindex, filters=self._filters(ifindex, EGRESS))
        for delete in classifying.remove_from_egress(found):
            self._send(messages.encode(delete, ifindex, None))

    def _root_filters(self, found: Observed) -> tuple[Filter, ...]:
        """The filters at all qdiscs of our tree that could ask one where a packet goes."""
        asking = (item.handle for item in found.qdiscs if isinstance(item.options, _ASKING))
        return self._filters(found.ifindex, *asking)

    def _filters(self, ifindex: int, *parents: int) -> tuple[Filter, ...]:
        found = [
            decode.filter_(message, parent)
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


def _is_there(ifindex: int) -> bool:
    try:
        socket.if_indextoname(ifindex)
    except OSError:
        return False
    return True


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
    if isinstance(change, AddRoot) and isinstance(change.options, Mqprio):
        return FeatureMissing(
            f"{iface}'s driver offers no traffic classes: {os.strerror(error.code)}",
            hint="leave --qdisc out: the kernel then orders the bands itself",
        )
    feature = _feature(change)
    if error.code in (errno.ENOENT, errno.EOPNOTSUPP) and feature:
        return FeatureMissing(
            f"the kernel lacks {feature}", hint="load the module or use a kernel that has it"
        )
    return ApplyError(
        f"{iface}: could not {doing}: {os.strerror(error.code)}",
        hint="run `tlsched status` to see what the link has",
    )


def _feature(change: Change | None) -> str | None:
    """What of the kernel a change needs, with the name of its build option."""
    match change:
        case SetFilter():
            return _FILTER
        case SetU32():
            return "u32 or skbedit (CONFIG_NET_CLS_U32, CONFIG_NET_ACT_SKBEDIT)"
        case AddRoot(options=options):
            return f"the qdisc {options.kind} ({_CONFIG[options.kind]})"
        case SetQueue(new=queue):
            return f"the qdisc {queue.options.kind} ({_CONFIG[queue.options.kind]})"
    return None
