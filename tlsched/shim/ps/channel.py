"""A non-blocking connection that carries records, a step at a time, in both directions."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from tlsched.bands import Band
from tlsched.shim import sockets
from tlsched.shim.ps.wire import HEAD

# tcp(7): a peer that has vanished without a word is found out after a minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
Sent = Callable[[], object]
_NOTHING = memoryview(b"")


class Closed(Exception):
    """The connection has ended; the text says how."""


class Channel:
    """One connection. ``head`` holds the head of the record that is being received.

    ``lane`` is its urgency, 0 first.
    """

    __slots__ = (
        "_begun",
        "_got",
        "_head_view",
        "_into",
        "_lowat",
        "_out",
        "fd",
        "head",
        "lane",
        "sock",
    )

    def __init__(self, sock: socket.socket, lane: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for level, option, value in _KEEPALIVE:
            sock.setsockopt(level, option, value)
        self.sock = sock
        self.fd = sock.fileno()
        self.lane = lane
        self.head = bytearray(HEAD.size)
        self._head_view = memoryview(self.head)
        self._got = 0
        self._into: memoryview | None = None
        self._lowat = 1
        self._out: deque[tuple[list[memoryview], Sent | None]] = deque()
        self._begun = False  # whether a part of the first record has left

    @property
    def sending(self) -> bool:
        """Whether something is left to send."""
        return bool(self._out)

    def post(self, *parts: bytes | memoryview, sent: Sent | None = None) -> None:
        """Send ``parts`` after all that was posted before, and call ``sent`` then."""
        self._out.append(([memoryview(part) for part in parts], sent))

    def drop_unsent(self) -> None:
        """Forget what was posted, but for the rest of a record that has begun to leave."""
        while len(self._out) > self._begun:
            self._out.pop()

    def send(self) -> None:
        """Send what the socket takes of one record. Raises :class:`Closed`."""
        if not self._out:
            return
        parts, sent = self._out[0]
        try:
            count = self.sock.sendmsg(parts)
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(error.strerror or str(error)) from None
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        self._begun = bool(parts)
        if parts:
            parts[0] = parts[0][count:]
            return
        self._out.popleft()
        if sent is not None:
            sent()

    def receive(self, place: Callable[[Channel], memoryview | None]) -> bool:
        """Receive what is there of one record; True when it is complete.

        ``place`` tells, when ``head`` is there, where the payload goes, or None for not yet: then
        call again when it will. Raises :class:`Closed`.
        """
        if self._into is None:
            if self._got < HEAD.size and not self._fill(self._head_view):
                return False
            self._into = place(self)
            if self._into is None:
                return False
            self._got = 0
        if self._got < len(self._into) and not self._fill(self._into):
            self._wake_at(len(self._into) - self._got)
            return False
        self._into, self._got = None, 0
        self._wake_at(1)
        return True

    def _wake_at(self, count: int) -> None:
        """Have epoll tell of this socket when ``count`` bytes are there (or its end), not before.

        On a link that is slower than the processor every packet would wake this process otherwise,
        several times a segment (SO_RCVLOWAT: socket(7); for tcp epoll heeds it).
        """
        if self._lowat != count:
            self._lowat = count
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _fill(self, into: memoryview) -> bool:
        try:
            count = self.sock.recv_into(into[self._got :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise Closed(error.strerror or str(error)) from None
        if not count:
            raise Closed("closed by the other end")
        self._got += count
        return self._got == len(into)


def mark(sock: socket.socket, band: Band) -> None:
    """Give ``sock`` ``band``'s marks (OSError when the kernel refuses)."""
    local, peer = sock.getsockname()[:2], sock.getpeername()[:2]
    sockets.mark(sockets.Connection(sock.fileno(), local, peer), band)
