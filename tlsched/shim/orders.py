"""Rank 0's orders: which bucket's next piece is handed over, told to all others as it happens.

One TCP connection to each other rank and a thread there that reads. An order is late by what the
network and one wake-up take; a gloo collective goes through three threads on each side, which on
busy cores takes milliseconds. The connections lead where the lane's do, and whoever connects has
to show a token that only the ranks know.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlsched.errors import CommunicationError
from tlsched.planning.tuning import Tuning
from tlsched.shim.agreement import Agreement
from tlsched.shim.lanes import Lane
from tlsched.shim.roster import Roster
from tlsched.shim.sockets import ends, receive_exactly

_HEAD = struct.Struct("!QQI")  # round, partition in bytes, how many buckets follow
_HELLO = struct.Struct("!16sI")  # token, rank
_CONNECT_S = 10.0
_HELLO_S = 1.0


class OrdersLost(Exception):
    """The connection to ``rank`` is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank

    def told(self, roster: Roster) -> CommunicationError:
        """What to raise."""
        who = roster.who_broke(self.rank, {self.rank})
        return CommunicationError(
            f"passing on rank 0's order failed: {who}", hint="see that rank's own error"
        )


@dataclass(frozen=True, slots=True)
class Order:
    """The next piece of each of ``buckets``, which are cut by ``partition_bytes``.

    ``round`` counts the backwards since the connections were made.
    """

    round: int
    partition_bytes: int
    buckets: tuple[int, ...]


class Leader:
    """Rank 0's end. ``tuning`` chooses its window, where it is not fixed."""

    def __init__(self, followers: Mapping[int, socket.socket], tuning: Tuning | None) -> None:
        self.tuning = tuning
        self._followers = dict(followers)
        self._round = 0

    def begin_round(self) -> None:
        """What is told from now on belongs to the next backward."""
        self._round += 1

    def tell(self, partition_bytes: int, buckets: Sequence[int]) -> None:
        """Tell all others. Raises :class:`OrdersLost`."""
        head = _HEAD.pack(self._round, partition_bytes, len(buckets))
        record = head + struct.pack(f"!{len(buckets)}I", *buckets)
        for rank, follower in self._followers.items():
            try:
                follower.sendall(record)
            except OSError as error:
                raise OrdersLost(rank) from error

    def close(self) -> None:
        """Leave."""
        for follower in self._followers.values():
            follower.close()


class Follower:
    """Another rank's end, and the thread that reads.

    Rank 0 may be a backward ahead; its orders for it are kept until that begins here.
    """

    def __init__(self, leader: socket.socket) -> None:
        self._leader = leader
        self._round = 0
        self._early: list[Order] = []
        self._lost = False
        self._hear: Callable[[Order], None] | None = None
        self._on_loss: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="tlsched orders", daemon=True)
        self._thread.start()

    def begin_round(self, hear: Callable[[Order], None], on_loss: Callable[[], None]) -> None:
        """Call ``hear`` with each order of the next backward, ``on_loss`` when no more can come.

        In the thread that reads, or in this one for what was early; never in both at once.
        """
        with self._lock:
            self._round += 1
            self._hear, self._on_loss = hear, on_loss
            early, self._early = self._early, []
            for order in early:
                self._deliver(order)
            if self._lost:
                on_loss()

    def close(self) -> None:
        """Leave. The thread ends."""
        with contextlib.suppress(OSError):  # it is closed at the other end
            self._leader.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CONNECT_S)
        self._leader.close()
        self._hear = self._on_loss = None

    def _deliver(self, order: Order) -> None:
        if order.round != self._round:
            self._early.append(order)
        elif self._hear is not None:
            self._hear(order)

    def _read(self) -> None:
        while True:
            try:
                number, partition_bytes, count = _HEAD.unpack(
                    receive_exactly(self._leader, _HEAD.size)
                )
                buckets = struct.unpack(f"!{count}I", receive_exactly(self._leader, 4 * count))
            except OSError:
                break
            with self._lock:
                self._deliver(Order(number, partition_bytes, buckets))
        with self._lock:
            self._lost = True
            if self._on_loss is not None:
                self._on_loss()


def open_orders(
    agreement: Agreement, lane: Lane, make_tuning: Callable[[], Tuning | None]
) -> Leader | Follower:
    """Connect all ranks of ``agreement`` to rank 0, by the addresses of ``lane``'s connections.

    Raises CommunicationError, on all ranks, naming one that cannot.
    """
    token, listeners = secrets.token_bytes(16), {}
    if agreement.rank == 0:
        listeners = _listen(lane)
    ports = {address: one.getsockname()[1] for address, one in listeners.items()}
    try:
        token, ports = agreement.from_rank_0("address for orders", (token, ports))
        leader, problem = None, None
        if agreement.rank != 0:
            leader, problem = _connect(lane, ports, _HELLO.pack(token, agreement.rank))
        for rank, text in enumerate(agreement.gather("connection for orders", problem)):
            if text is not None:
                raise CommunicationError(
                    f"{agreement.roster.name(rank)} cannot be given rank 0's orders ({text})",
                    hint='use policy="kernel", which needs none',
                )
        if leader is not None:
            return Follower(leader)
        return Leader(_accept(agreement, listeners, token), make_tuning())
    finally:
        for listener in listeners.values():
            listener.close()


def _listen(lane: Lane) -> dict[str, socket.socket]:
    """A listener at each address by which another rank reaches this one."""
    listeners: dict[str, socket.socket] = {}
    for connection in lane.connections.values():
        if connection.local[0] not in listeners:
            family, local, _ = ends(connection)
            listener = listeners[connection.local[0]] = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((local[0], 0, *local[2:]))
            listener.listen(lane.roster.size)
    return listeners


def _connect(
    lane: Lane, ports: Mapping[str, int], hello: bytes
) -> tuple[socket.socket | None, str | None]:
    """The connection to rank 0, or why there is none."""
    connection = lane.connections.get(0)
    if connection is None or connection.peer[0] not in ports:
        return None, "its connection to rank 0 cannot be told from others: is there NAT?"
    family, _, peer = ends(connection)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect((peer[0], ports[connection.peer[0]], *peer[2:]))
        sock.sendall(hello)
    except OSError as error:
        sock.close()
        return None, str(error.strerror or error)
    sock.settimeout(None)
    return sock, None


def _accept(
    agreement: Agreement, listeners: Mapping[str, socket.socket], token: bytes
) -> dict[int, socket.socket]:
    """All others, who have connected already; whoever does not know ``token`` is turned away."""
    found: dict[int, socket.socket] = {}
    end_s = time.monotonic() + _CONNECT_S
    with selectors.DefaultSelector() as selector:
        for listener in listeners.values():
            selector.register(listener, selectors.EVENT_READ, listener)
        while len(found) < agreement.size - 1:
            ready = selector.select(max(0.0, end_s - time.monotonic()))
            if not ready:
                missing = sorted(set(range(1, agreement.size)) - set(found))
                raise CommunicationError(
                    f"{agreement.roster.listed(missing)} did not connect for rank 0's orders",
                    hint="see that rank's own error",
                )
            for key, _ in ready:
                sock, _ = key.data.accept()
                rank = _welcome(sock, token)
                if rank is None or rank in found:
                    sock.close()
                else:
                    found[rank] = sock
    for sock in found.values():
        sock.settimeout(agreement.timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _welcome(sock: socket.socket, token: bytes) -> int | None:
    """The rank that has connected, if it is one."""
    sock.settimeout(_HELLO_S)
    try:
        shown, rank = _HELLO.unpack(receive_exactly(sock, _HELLO.size))
    except OSError:
        return None
    return int(rank) if secrets.compare_digest(shown, token) else None
