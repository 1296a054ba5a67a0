"""Lanes: process groups of their own, whose sockets all carry one priority and one DSCP.

One TCP connection cannot reorder its bytes, and gloo keeps one a pair of ranks and group; so what
shall overtake needs a group of its own. Lanes are independent of each other: only inside a lane
must all ranks issue their collectives in the same order.
"""

from __future__ import annotations

import datetime
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from tlsched.bands import Band
from tlsched.errors import CommunicationError
from tlsched.shim import sockets
from tlsched.shim.agreement import Agreement
from tlsched.shim.lane import AnyLane
from tlsched.shim.reduction import Reduction
from tlsched.shim.roster import Roster
from tlsched.shim.transport import GLOO, Transport

STARTS = 5  # all-reduces that are tried for how long one takes to start
_SPARE_FDS = 16  # for the store's and the program's own passing needs
# What gloo says when its timer ran out, and of a pair that it closed for that reason.
_TIME_IS_UP = ("Timed out waiting", "Application timeout")
_ABORT_S = 2.0  # what was cut has failed long before


@dataclass(slots=True)
class Lane:
    """A process group and its connections.

    ``marked`` are the sockets for the lane's marks. ``connections`` tells them by rank where a
    lane has one for each (see :class:`~tlsched.shim.transport.Transport`), and is empty otherwise.
    The group is made without torch's registry of groups: new_group() reuses a name after
    destroy_process_group(), and with the name the addresses that the store still holds.
    """

    index: int
    group: Any  # a c10d backend, whose collectives torch's stubs lack; None once closed
    connections: dict[int, sockets.Connection]
    marked: tuple[sockets.Connection, ...]
    roster: Roster
    timeout_s: float
    transport: Transport = GLOO
    _sum: dist.AllreduceOptions = field(default_factory=dist.AllreduceOptions)
    _from_rank_0: dist.BroadcastOptions = field(default_factory=dist.BroadcastOptions)
    _running: WeakSet[Reduction] = field(default_factory=WeakSet)

    def __post_init__(self) -> None:
        self._sum.timeout = self._from_rank_0.timeout = datetime.timedelta(seconds=self.timeout_s)

    @property
    def control(self) -> Lane:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return self

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return {(c.local[0], c.peer[0]) for c in self.marked}

    @property
    def one_order(self) -> bool:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return self.transport.one_order

    def all_reduce(self, flat: torch.Tensor) -> Reduction:
        """Start summing the contiguous tensor ``flat`` over all ranks, in place."""
        return self._watched(self.group.allreduce([flat], self._sum))

    def start_s(self, device: torch.device) -> float:
        """Seconds that an all-reduce of next to nothing takes: the least of several."""
        return least_start_s(self, self.index, device)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite ``tensors`` (any strides) with rank 0's values."""
        with torch.no_grad():
            for tensor in tensors:
                if tensor.numel():
                    # A copy: gloo's thread may hold what it sent for a while, and a parameter that
                    # somebody holds is one that somebody may read.
                    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
                    sent = self._watched(self.group.broadcast([whole], self._from_rank_0))
                    try:
                        sent.wait(self.timeout_s)
                    except RuntimeError as error:
                        what = f"sending {self.roster.name(0)}'s values on lane {self.index}"
                        raise self.failure(what, error) from error
                    tensor.copy_(whole)

    def failure(self, what: str, error: RuntimeError) -> CommunicationError:
        """The error that says what failed and through whom, where gloo's is ``error``."""
        text = str(error)
        if any(words in text for words in _TIME_IS_UP):
            who = self.roster.who_is_silent(self.index, self.timeout_s)
        else:
            gone = {r for r, c in self.connections.items() if not sockets.alive(c)}
            who = self.roster.who_broke(self.rank_of(text), gone)
        return CommunicationError(
            f"{what} failed: {who}",
            hint="see that rank's own error; every rank must run the same number of backwards",
        )

    def rank_of(self, text: str) -> int | None:
        """The rank whose address appears in ``text``, an error message of gloo's.

        gloo prints the port in network byte order (Address::str of its tcp transport), on
        little-endian machines with its bytes swapped, so both readings count.
        """
        found = {
            rank
            for rank, connection in self.connections.items()
            for port in (connection.peer[1], socket.htons(connection.peer[1]))
            if re.search(rf"{re.escape(connection.peer[0])}(%\w+)?\]?:{port}\b", text)
        }
        return found.pop() if len(found) == 1 else None

    def close(self, *, abort: bool) -> None:
        """Leave the group; with ``abort`` cut its connections first, so that nothing waits.

        gloo's own abort() leaves running collectives waiting for their peers. They are awaited
        here, since they write into the gradients. One that gloo forgot about (see :meth:`broken`)
        ends with its timeout only, and its group's destructor waits for it: in a thread, then.
        """
        if abort:
            for connection in self.connections.values():
                sockets.cut(connection)
            self.transport.abort(self.group)
        end_s = time.monotonic() + (_ABORT_S if abort else 0.0)
        left: list[Any] = [self.group]
        for reduction in list(self._running):
            stuck = abort and not reduction.ends_by(end_s)
            work = reduction.drop("the lane is closed")
            if stuck:
                left.append(work)
            del work
        self.transport.leave(self.group)
        self.group = None
        if left[1:]:
            threading.Thread(target=left.clear, name="tlsched lane", daemon=True).start()

    def broken(self) -> str | None:
        """What gloo would say had it not missed it: a connection of this lane is closed.

        gloo (tcp transport, Pair::sendAsyncMode) queues a send whose first write fails, after it
        has told everybody else of the failure, so that this one waits for the timeout.
        """
        for connection in self.connections.values():
            if not sockets.alive(connection):
                host, port = connection.peer
                return f"Connection closed: [{host}]:{port}"
        return None

    def _watched(self, work: dist.Work) -> Reduction:
        self.roster.started[self.index] += 1
        reduction = Reduction(self.transport.running(work), self.roster, self.broken)
        self._running.add(reduction)
        return reduction


def least_start_s(lane: AnyLane, index: int, device: torch.device) -> float:
    """See :meth:`~tlsched.shim.lane.AnyLane.start_s`."""
    times = []
    for _ in range(STARTS):
        began_s = time.perf_counter()
        started = lane.all_reduce(torch.zeros(1, device=device))
        try:
            started.wait(lane.timeout_s)
        except RuntimeError as error:
            raise lane.failure(f"trying lane {index}", error) from error
        times.append(time.perf_counter() - began_s)
    return min(times)


def open_lanes(agreement: Agreement, count: int, transport: Transport = GLOO) -> list[Lane]:
    """Make ``count`` lanes over all ranks of ``agreement``, in one order on all of them.

    Raises CommunicationError, on all ranks, when one of them lacks file descriptors.
    """
    _require_fds(agreement, count, count * transport.fds_a_lane(agreement.size) + _SPARE_FDS)
    agreement.roster.started = [0] * count
    lanes: list[Lane] = []
    try:
        for index in range(count):
            lanes.append(_open_lane(agreement, index, transport))  # noqa: PERF401  # what is open is closed
    except BaseException:
        for lane in lanes:
            lane.close(abort=True)
        raise
    return lanes


def _require_fds(agreement: Agreement, count: int, needed: int) -> None:
    """Ask before anything is opened: gloo aborts or hangs where an accept() fails."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = limit - len(os.listdir("/proc/self/fd")) if limit != resource.RLIM_INFINITY else needed
    for rank, theirs in enumerate(agreement.gather("room for file descriptors", room)):
        if theirs < needed:
            raise CommunicationError(
                f"{agreement.roster.name(rank)} has room for {theirs} more file descriptors, and "
                f"{count} lanes over {agreement.size} ranks need {needed}",
                hint='raise its limit (`ulimit -n`), or use policy="fifo", which needs one lane',
            )


def mark_lanes(agreement: Agreement, lanes: Sequence[Lane], bands: Sequence[Band]) -> str | None:
    """Mark lane *i*'s sockets with ``bands[i]`` on all ranks, or say why they stay unordered.

    Returns None, or the first rank's reason (the same answer on every rank).
    """
    reason = lanes[0].transport.why_unmarked(agreement, lanes) or _mark(lanes, bands)
    reasons = agreement.gather("lanes' marks", reason)
    for rank, text in enumerate(reasons):
        if text is not None:
            return f"on {agreement.roster.name(rank)}, {text}"
    return None


def _mark(lanes: Sequence[Lane], bands: Sequence[Band]) -> str | None:
    try:
        for lane, band in zip(lanes, bands, strict=True):
            for connection in lane.marked:
                sockets.mark(connection, band)
    except OSError as error:
        return f"the kernel refuses a mark ({error.strerror})"
    return None


def _open_lane(agreement: Agreement, index: int, transport: Transport) -> Lane:
    def make() -> Any:
        store = agreement.substore(f"lane{index}")
        return transport.make(store, agreement.rank, agreement.size, agreement.timeout_s, index)

    try:
        group, connections = sockets.sockets_made_by(make)
    except (OSError, RuntimeError) as error:
        raise CommunicationError(
            f"lane {index} could not be opened ({_first_line(error)})",
            hint="see the other ranks' errors; all ranks need an interface on which they reach "
            f"each other (see {transport.name.upper()}_SOCKET_IFNAME)",
        ) from error
    pairs = agreement.gather("lane's addresses", [(c.local, c.peer) for c in connections])
    found = sockets.shared(connections, pairs, agreement.rank)
    by_rank = sockets.one_each(found) if transport.one_socket_a_peer else {}
    marked = tuple(by_rank.values() if transport.one_socket_a_peer else (c for _, c in found))
    for connection in marked:
        os.set_inheritable(connection.fd, False)  # a program that outlives us would keep it open
    roster, timeout_s = agreement.roster, agreement.timeout_s
    return Lane(index, group, by_rank, marked, roster, timeout_s, transport)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
