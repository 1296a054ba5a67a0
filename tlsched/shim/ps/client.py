"""A worker's end: one thread that sends its segments and receives the sums, for all lanes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from tlsched.bands import Band
from tlsched.shim.ps.channel import Channel, Closed
from tlsched.shim.ps.connecting import Place, connect
from tlsched.shim.ps.cutting import cut
from tlsched.shim.ps.exchange import Exchange
from tlsched.shim.ps.wire import (
    TROUBLE_BYTES,
    Head,
    Hello,
    Kind,
    Trouble,
    read_trouble,
    unpack,
)

LEAVE_S = 2.0


class Line(Channel):
    """The connection to one server for one lane. ``expected`` are the sums that will come back."""

    __slots__ = ("expected", "mask", "server", "trouble")

    def __init__(self, sock: socket.socket, lane: int, server: int) -> None:
        super().__init__(sock, lane)
        self.server = server
        self.mask = 0
        self.trouble: bytearray | None = None
        self.expected: deque[tuple[bytes, memoryview, Exchange]] = deque()


class Client:
    """Connections of one worker to all ``places``, for all lanes of ``hello``.

    ``failure`` is why nothing more can be summed, ``trouble`` what a server said of it.
    Raises CommunicationError naming the server that cannot be reached, or turns this worker away.
    """

    def __init__(self, places: Sequence[Place], hello: Hello, bands: Sequence[Band | None]) -> None:
        self.places = tuple(places)
        self.failure: str | None = None
        self.trouble: Trouble | None = None
        self._lines: dict[tuple[int, int], Line] = {}
        self._by_fd: dict[int, Line] = {}
        self._counts = [0] * hello.lanes
        self._posted: deque[tuple[Line, bytes, memoryview | None, Exchange | None]] = deque()
        self._lock = threading.Lock()
        self._running: set[Exchange] = set()
        self._leave = threading.Event()
        self._abort = False
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        try:
            for server, place in enumerate(self.places):
                for lane in range(hello.lanes):
                    sock = connect(place, replace(hello, lane=lane), bands[lane])
                    self._add(Line(sock, lane, server))
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._serve, name="tlsched servers", daemon=True)
        self._thread.start()

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """This host's and the server's address of each connection."""
        return {
            (line.sock.getsockname()[0], line.sock.getpeername()[0])
            for line in self._lines.values()
        }

    def silent(self, lane: int) -> list[str]:
        """The servers that owe this worker something in ``lane``."""
        return [
            str(self.places[server])
            for (server, its_lane), line in self._lines.items()
            if its_lane == lane and line.expected
        ]

    def reduce(self, lane: int, exchange: Exchange, code: int, item_bytes: int, hold: bool) -> None:
        """Have ``exchange``'s memory summed over all workers, in lane ``lane``.

        All workers call it for the same sums in the same order in each lane. With ``hold`` a
        server sends nothing back before it has the whole of its share.
        """
        memory = exchange.memory
        total = len(memory)
        number = self._counts[lane]
        self._counts[lane] += 1
        segments = cut(total, item_bytes, len(self.places), number)
        last = {segment.server: index for index, segment in enumerate(segments)}
        for segment in segments:
            exchange.left[segment.server] = exchange.left.get(segment.server, 0) + 1
        with self._lock:
            if self.failure is None:
                self._running.add(exchange)
                for index, (server, start, stop) in enumerate(segments):
                    held = hold and last[server] != index
                    head = Head(Kind.SEGMENT, code, held, stop - start, number, start, total).pack()
                    part = memory[start:stop]
                    self._posted.append((self._lines[server, lane], head, part, exchange))
        if self.failure is not None:
            exchange.end(self.failure)
            return
        os.eventfd_write(self._wake, 1)

    def close(self, *, abort: bool) -> None:
        """Say goodbye and leave; with ``abort`` just leave, so that the others hear of it."""
        self._abort = abort
        if not abort:
            goodbye = Head(Kind.BYE, 0, 0, 0, 0, 0, 0).pack()
            with self._lock:
                self._posted.extend((line, goodbye, None, None) for line in self._lines.values())
        self._leave.set()
        with contextlib.suppress(OSError):  # the thread has ended
            os.eventfd_write(self._wake, 1)
        self._thread.join(LEAVE_S)
        if self._thread.is_alive() and not abort:  # a server does not take its goodbye
            self.close(abort=True)

    def _add(self, line: Line) -> None:
        self._lines[line.server, line.lane] = self._by_fd[line.fd] = line
        line.mask = select.EPOLLIN
        self._epoll.register(line.fd, line.mask)

    def _serve(self) -> None:
        """The thread. After a failure nothing moves, but connections stay until :meth:`close`.

        So that whoever is to blame is known before the others hear that this worker leaves.
        """
        try:
            while self.failure is None and not self._over:
                for fd, mask in self._by_urgency(self._epoll.poll()):
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                        self._take_posted()
                    elif fd in self._by_fd:
                        self._turn(self._by_fd[fd], mask)
        except Exception as error:  # a defect of ours must leave nobody waiting
            self._fail(f"the servers' thread ended ({type(error).__name__}: {error})")
        finally:
            self._fail("the lane is closed")
            self._leave.wait()
            self._close_all()

    @property
    def _over(self) -> bool:
        """Whether this worker leaves, and has sent what it has to."""
        if not self._leave.is_set():
            return False
        return self._abort or not (
            self._posted or any(line.sending for line in self._lines.values())
        )

    def _by_urgency(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if len(events) > 1:
            lines = self._by_fd
            events.sort(key=lambda event: lines[event[0]].lane if event[0] in lines else -1)
        return events

    def _take_posted(self) -> None:
        """Hand what the training thread posted to its connections."""
        fresh: dict[int, Line] = {}
        while self._posted:
            line, head, part, exchange = self._posted.popleft()
            if part is None or exchange is None:
                line.post(head)
            else:
                line.expected.append((head, part, exchange))
                line.post(head, part)
            fresh[line.fd] = line
        for line in sorted(fresh.values(), key=lambda one: one.lane):
            self._turn(line, select.EPOLLOUT)

    def _turn(self, line: Line, mask: int) -> None:
        """A step of ``line``."""
        if self.failure is not None:
            return
        try:
            if mask & ~select.EPOLLOUT and line.receive(self._place):
                self._arrived(line)
            if mask & select.EPOLLOUT:
                line.send()
        except Closed as closed:
            self._hear_last_words(line)
            self._lose(line, str(closed))
            return
        wanted = select.EPOLLIN | (select.EPOLLOUT if line.sending else 0)
        if wanted != line.mask:
            line.mask = wanted
            self._epoll.modify(line.fd, wanted)

    def _place(self, channel: Channel) -> memoryview:
        """Where the record that ``channel`` begins goes: into the gradient itself."""
        assert isinstance(channel, Line)
        what = unpack(channel.head)
        if what.kind == Kind.TROUBLE and what.length <= TROUBLE_BYTES:
            channel.trouble = bytearray(what.length)
            return memoryview(channel.trouble)
        if not channel.expected or channel.expected[0][0] != channel.head:
            raise Closed(f"it sent {what}, for which nobody asked")
        return channel.expected[0][1]

    def _arrived(self, line: Line) -> None:
        if line.trouble is not None:
            self.trouble = read_trouble(line.trouble)
            self._fail(f"{self.places[line.server]} ended the job: {self.trouble.text}")
            return
        _, _, exchange = line.expected.popleft()
        if exchange.arrived(line.server):
            with self._lock:
                self._running.discard(exchange)
            exchange.end()

    def _hear_last_words(self, line: Line) -> None:
        """What the server said before it closed: why it ended the job, perhaps."""
        with contextlib.suppress(Closed):
            while self.failure is None and line.receive(self._place):
                self._arrived(line)

    def _lose(self, line: Line, how: str) -> None:
        place = self.places[line.server]
        self._fail(f"{place} left (its process ended, or the connection to it was cut: {how})")

    def _fail(self, why: str) -> None:
        """End all that runs; the first reason stays."""
        with self._lock:
            self.failure = self.failure or why
            running, self._running = self._running, set()
            self._posted.clear()
        for exchange in running:
            exchange.end(self.failure)

    def _close_all(self) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # a forked process may hold the socket as well
                line.sock.shutdown(socket.SHUT_RDWR)
            line.sock.close()
        self._epoll.close()
        with contextlib.suppress(OSError):
            os.close(self._wake)
