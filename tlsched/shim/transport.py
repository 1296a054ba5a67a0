"""What a lane asks of its backend: to make its group, to watch its collectives, to leave it.

gloo is here, NCCL in :mod:`tlsched.shim.nccl`; nothing else in the training process tells them
apart.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tlsched.shim.agreement import Agreement

if TYPE_CHECKING:
    from tlsched.shim.lanes import Lane

# What one gloo group costs a process besides its N-1 sockets: a listener, epoll and event files.
FDS_BESIDE_PEERS = 4
# All ranks are known to be there when lanes open, and gloo's constructor hears no Ctrl-C.
_CONNECT_S = 60.0


class Transport(Protocol):
    """A backend, as its lanes see it.

    ``facts`` are lines that must be equal on all ranks. ``one_order`` tells that all ranks must
    start the collectives of all lanes in one order, and not only those of each lane.
    ``one_socket_a_peer`` tells that a lane has exactly one socket to each other rank, by which a
    broken lane names the rank; otherwise all sockets of a lane that lead to other ranks are marked.
    """

    name: str
    facts: Sequence[str]
    one_order: bool
    one_socket_a_peer: bool

    def fds_a_lane(self, size: int) -> int:
        """File descriptors that a lane over ``size`` ranks needs, as far as is known."""

    def make(self, store: Store, rank: int, size: int, timeout_s: float, lane: int) -> Any:
        """The process group of lane number ``lane``, connected."""

    def running(self, work: dist.Work) -> Any:
        """``work`` with gloo's manners: wait(limit), is_completed(), get_future()."""

    def abort(self, group: Any) -> None:
        """Give up what runs on ``group``, so that nobody waits for it."""

    def leave(self, group: Any) -> None:
        """``group`` is done with: all that was started on it has ended."""

    def why_unmarked(self, agreement: Agreement, lanes: Sequence[Lane]) -> str | None:
        """Why ``lanes`` cannot carry marks, or None."""

    def findings(self) -> Sequence[str]:
        """What of the process's settings stands in the lanes' way, and its remedy."""


class Gloo:
    """Lanes of TCP sockets, one a pair of ranks; independent of each other."""

    name = "gloo"
    facts: Sequence[str] = ()
    one_order = False
    one_socket_a_peer = True

    def fds_a_lane(self, size: int) -> int:
        """See :class:`Transport`."""
        return size - 1 + FDS_BESIDE_PEERS

    def make(self, store: Store, rank: int, size: int, timeout_s: float, lane: int) -> Any:
        """See :class:`Transport`."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        options._timeout = datetime.timedelta(seconds=min(timeout_s, _CONNECT_S))
        # A lane's buckets follow each other: a second thread would keep buffers of its own.
        options._threads = 1
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        options._devices = (
            [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
            if names
            else [dist.ProcessGroupGloo.create_default_device()]
        )
        return dist.ProcessGroupGloo(store, rank, size, options)

    def running(self, work: dist.Work) -> dist.Work:
        """See :class:`Transport`."""
        return work

    def abort(self, group: Any) -> None:
        """gloo's own abort leaves running collectives waiting: its lane cuts the sockets."""

    def leave(self, group: Any) -> None:
        """A gloo group ends with its last reference."""

    def why_unmarked(self, agreement: Agreement, lanes: Sequence[Lane]) -> str | None:
        """See :class:`Transport`."""
        for lane in lanes:
            if len(lane.connections) != agreement.size - 1:
                return f"lane {lane.index}'s sockets cannot be told from others (is there NAT?)"
        return None

    def findings(self) -> Sequence[str]:
        """See :class:`Transport`."""
        return ()


GLOO = Gloo()
