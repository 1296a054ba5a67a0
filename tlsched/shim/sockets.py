"""The sockets of a lane: found, matched with their peers' ends, and marked.

gloo offers no hook for its sockets, so those that appear in /proc/self/fd while a process group is
being made are taken for the group's, and only those whose (local, peer) addresses appear mirrored
at exactly one other rank are believed. Both ends are marked: acknowledgements carry the mark too,
and accept() inherits the TOS but not the priority (socket(7), ip(7)).
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tlsched.bands import Band

Address = tuple[str, int]
T = TypeVar("T")

# Two threads that make groups at the same time would see each other's sockets.
_making_group = threading.Lock()


@dataclass(frozen=True, slots=True)
class Connection:
    """A connected stream socket of this process: file descriptor and both addresses."""

    fd: int
    local: Address
    peer: Address


def sockets_made_by(make: Callable[[], T]) -> tuple[T, list[Connection]]:
    """Call ``make`` and return its result, with the connections that appeared meanwhile."""
    with _making_group:
        before = {(c.fd, c.local, c.peer) for c in _connections()}
        made = make()
        after = list(_connections())
    return made, [c for c in after if (c.fd, c.local, c.peer) not in before]


def shared(
    mine: Sequence[Connection],
    pairs_of_ranks: Sequence[Sequence[tuple[Address, Address]]],
    rank: int,
) -> list[tuple[int, Connection]]:
    """The connections of ``mine`` whose other end another rank holds, each with that rank.

    ``pairs_of_ranks[r]`` lists rank r's (local, peer) addresses. A pair that more than one rank
    mirrors is left out: it cannot be told whose it is.
    """
    holders: dict[tuple[Address, Address], list[int]] = {}
    for other, pairs in enumerate(pairs_of_ranks):
        if other != rank:
            for local, peer in pairs:
                holders.setdefault((peer, local), []).append(other)
    return [
        (holders[key][0], connection)
        for connection in mine
        if len(holders.get(key := (connection.local, connection.peer), ())) == 1
    ]


def one_each(found: Sequence[tuple[int, Connection]]) -> dict[int, Connection]:
    """By rank, without the ranks that have two: it cannot be told which is the lane's."""
    times = Counter(other for other, _ in found)
    return {other: connection for other, connection in found if times[other] == 1}


def ends(connection: Connection) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
    """The socket's family, its own address and its peer's, as the socket module writes them."""
    with _borrowed(connection.fd) as sock:
        return sock.family, sock.getsockname(), sock.getpeername()


def mark(connection: Connection, band: Band) -> None:
    """Give the socket ``band``'s DSCP and priority (OSError when the kernel refuses).

    TOS comes first because setting it overwrites the priority (ip(7)). An IPv6 socket gets both
    options: to an IPv4-mapped peer only IP_TOS counts, to others only IPV6_TCLASS.
    """
    assert band.tos is not None
    assert band.priority is not None
    with _borrowed(connection.fd) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, band.tos)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, band.tos)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, band.priority)


def alive(connection: Connection) -> bool:
    """Whether its descriptor still is this connection, which gloo closes when it breaks."""
    try:
        with _borrowed(connection.fd) as sock:
            return _is(sock, connection)
    except OSError:
        return False  # closed, or no longer connected


def cut(connection: Connection) -> None:
    """End the connection, so that whoever waits for it fails at once, here and at the peer.

    Only reading is shut down: gloo then finds the end of the stream, fails what waits and closes
    the socket. If writing were shut too, a send that starts before gloo has noticed would fail
    with EPIPE, after which gloo waits for its completion until the timeout.
    """
    try:
        with _borrowed(connection.fd) as sock:
            if _is(sock, connection):
                sock.shutdown(socket.SHUT_RD)
    except OSError:
        return  # already closed, or the number belongs to another file now


def _is(sock: socket.socket, connection: Connection) -> bool:
    ends = (_address(sock.getsockname()), _address(sock.getpeername()))
    return ends == (connection.local, connection.peer)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object on a duplicate of ``fd``; the owner's descriptor stays untouched."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        yield sock


def _connections() -> Iterator[Connection]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with _borrowed(int(name)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if sock.type == socket.SOCK_STREAM:
                    local, peer = _address(sock.getsockname()), _address(sock.getpeername())
                    yield Connection(int(name), local, peer)
        except OSError:
            continue  # closed meanwhile, or a socket that is not connected


def _address(raw: tuple[object, ...]) -> Address:
    host = str(raw[0]).split("%", 1)[0].removeprefix("::ffff:")
    return host, int(str(raw[1]))


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """``size`` bytes. Raises OSError when the other end closes before."""
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return bytes(parts)
