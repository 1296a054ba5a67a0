"""A server's loop: one thread that does everything, the most urgent lane first."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tlsched.shim.ps.channel import Closed, mark
from tlsched.shim.ps.job import Job, Member
from tlsched.shim.ps.line import Mismatch
from tlsched.shim.ps.wire import HELLO_BYTES, Hello, Trouble, read_hello

HELLO_S = 10.0  # how long whoever connects may take to say who it is
FAREWELL_S = 5.0  # and whoever was told that its job is over, to close
STRANGERS = 256  # how many that have not said who they are may wait
_SLICE_S = 1.0
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
STOPPED = Trouble("it was stopped")

Say = Callable[[str], None]


@dataclass(slots=True)
class Stranger:
    """A connection that has not said yet who it is."""

    sock: socket.socket
    name: str
    end_s: float
    raw: bytearray = field(default_factory=bytearray)


class Server:
    """Serves jobs at ``listener`` to whoever knows ``key``; ``say`` hears what an operator should.

    With ``jobs`` it ends when so many jobs have; otherwise when :meth:`stop` is called.
    """

    def __init__(self, listener: socket.socket, key: bytes, say: Say, *, jobs: int = 0) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._key = key
        self._say = say
        self._jobs_left = jobs or -1
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._strangers: dict[int, Stranger] = {}
        self._members: dict[int, Member] = {}
        self._masks: dict[int, int] = {}
        self._jobs: dict[bytes, Job] = {}
        self._stopped = False
        self._why = STOPPED
        self._end_s = self._begin_s = float("inf")
        self.trouble: Trouble | None = None
        self._handlers: dict[int, Callable[[], None]] = {}

    @property
    def jobs(self) -> list[Job]:
        """The jobs that are being served."""
        return list(self._jobs.values())

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call ``call`` when ``fd`` can be read or has been closed at its other end."""
        self._handlers[fd] = call
        self._epoll.register(fd, select.EPOLLIN)

    def begin_within(self, seconds: float) -> None:
        """End unless a job begins within ``seconds``; ``trouble`` says so then."""
        self._begin_s = time.monotonic() + seconds

    def unwatch(self, fd: int) -> None:
        """The opposite of :meth:`watch`."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def end_by(self, end_s: float) -> None:
        """End at a time of time.monotonic(), whoever is there still."""
        self._end_s = end_s

    def stop(self, why: Trouble = STOPPED) -> None:
        """End :meth:`serve` soon, telling jobs that run ``why``; a signal's handler may call it."""
        self._why, self._stopped = why, True
        os.eventfd_write(self._wake, 1)

    def serve(self) -> None:
        """Serve until the jobs are done or :meth:`stop` is called; then everything is closed."""
        next_look_s = 0.0
        try:
            while not self._stopped and self._jobs_left:
                for fd, mask in self._by_urgency(self._epoll.poll(_SLICE_S)):
                    self._handle(fd, mask)
                if time.monotonic() > next_look_s:
                    next_look_s = time.monotonic() + _SLICE_S
                    self._close_late()
        finally:
            self.close()

    def close(self) -> None:
        """Close every connection, after telling jobs that run why."""
        for job in list(self._jobs.values()):
            if job.trouble is None:
                job.end(self._why)
                self._settle(job)
        for stranger in self._strangers.values():
            stranger.sock.close()
        for member in self._members.values():
            member.sock.close()
        self._listener.close()
        self._epoll.close()
        os.close(self._wake)

    def _by_urgency(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if len(events) > 1:
            members = self._members
            events.sort(key=lambda event: members[event[0]].lane if event[0] in members else -1)
        return events

    def _handle(self, fd: int, mask: int) -> None:
        member = self._members.get(fd)
        if member is not None:
            self._turn(member, mask)
        elif fd in self._strangers:
            self._hear(self._strangers[fd])
        elif fd in self._handlers:
            self._handlers[fd]()
        elif fd == self._listener.fileno():
            self._accept()

    def _turn(self, member: Member, mask: int) -> None:
        """A step of ``member``, and of whoever can go on because of it."""
        job = member.job
        try:
            if mask & select.EPOLLOUT:
                member.send()
            if mask & select.EPOLLIN:
                self._receive(member)
            elif mask & _ENDED:
                raise Closed("the connection was closed")
        except Closed as closed:
            self._lose(member, str(closed))
        if self._members.get(member.fd) is member:
            self._listen_to(member)
        self._settle(job)

    def _receive(self, member: Member) -> None:
        job = member.job
        if job.trouble is not None:  # it may have much to send still; its end is what counts
            self._drain(member)
            return
        try:
            if member.receive(job.place):
                job.arrived(member)
        except Mismatch as mismatch:
            job.end(mismatch.trouble)

    def _drain(self, member: Member) -> None:
        try:
            if not member.sock.recv(1 << 16):
                raise Closed("closed by the other end")
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(error.strerror or str(error)) from None

    def _settle(self, job: Job) -> None:
        """Let all go on for whom something has changed in ``job``, the most urgent first."""
        told = job.trouble
        while job.stirred:
            members = sorted(job.stirred, key=_urgency)
            job.stirred.clear()
            for member in members:
                self._go_on(member)
        if told is None and job.trouble is not None:
            self._say(f"job {job.hello.job.hex()[:8]} has ended: {job.trouble.text}")

    def _go_on(self, member: Member) -> None:
        if self._members.get(member.fd) is not member:  # lost meanwhile
            return
        try:
            member.send()
        except Closed as closed:
            self._lose(member, str(closed))
        else:
            self._listen_to(member)

    def _listen_to(self, member: Member) -> None:
        """Ask for what ``member`` waits for."""
        mask = select.EPOLLRDHUP | (select.EPOLLOUT if member.sending else 0)
        if not member.job.is_paused(member):
            mask |= select.EPOLLIN
        if self._masks[member.fd] != mask:
            self._masks[member.fd] = mask
            self._epoll.modify(member.fd, mask)

    def _lose(self, member: Member, how: str) -> None:
        del self._members[member.fd], self._masks[member.fd]
        self._epoll.unregister(member.fd)
        member.sock.close()
        job = member.job
        job.leave(member, how)
        if not job.members:
            del self._jobs[job.hello.job]
            self._jobs_left -= 1
            if self._jobs_left == 0:
                self.trouble = job.trouble
            self._say(f"job {job.hello.job.hex()[:8]} is over")

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Whoever connected has gone; or there are no descriptors, and trying on would spin.
            self._epoll.modify(self._listener.fileno(), 0)
            return
        if len(self._strangers) >= STRANGERS:
            self._turn_away(next(iter(self._strangers.values())), "others wait")
        sock.setblocking(False)
        stranger = Stranger(sock, f"{address[0]}:{address[1]}", time.monotonic() + HELLO_S)
        self._strangers[sock.fileno()] = stranger
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _hear(self, stranger: Stranger) -> None:
        """Read a part of the hello; nothing of what follows it."""
        try:
            part = stranger.sock.recv(HELLO_BYTES - len(stranger.raw))
        except BlockingIOError:
            return
        except OSError as error:
            self._turn_away(stranger, error.strerror or str(error))
            return
        stranger.raw += part
        if not part:
            self._turn_away(stranger, "it closed before it said who it is")
        elif len(stranger.raw) == HELLO_BYTES:
            try:
                self._welcome(stranger, read_hello(stranger.raw))
            except (ValueError, OSError) as error:
                self._turn_away(stranger, str(error))

    def _welcome(self, stranger: Stranger, hello: Hello) -> None:
        """Raises ValueError saying why ``stranger`` is not welcome."""
        if not hmac.compare_digest(hello.key, self._key):
            raise ValueError("its token is not this server's")
        job = self._jobs.get(hello.job) or Job(hello)
        if (why_not := job.why_not(hello)) is not None:
            raise ValueError(why_not)
        member = Member(stranger.sock, hello, job)
        if hello.band is not None:
            mark(member.sock, hello.band)
        fd = member.fd
        del self._strangers[fd]
        self._members[fd] = member
        self._masks[fd] = select.EPOLLIN
        if hello.job not in self._jobs:
            self._jobs[hello.job] = job
            self._begin_s = float("inf")
            self._say(f"job {hello.job.hex()[:8]} begins: {hello.workers} workers")
        job.join(member)
        self._settle(job)

    def _turn_away(self, stranger: Stranger, why: str) -> None:
        """Close it, and tell it why if it listens."""
        self._say(f"{stranger.name} was turned away: {why}")
        self._epoll.unregister(stranger.sock.fileno())
        del self._strangers[stranger.sock.fileno()]
        with contextlib.suppress(OSError):
            stranger.sock.send(Trouble(why).record())
        stranger.sock.close()

    def _close_late(self) -> None:
        """Whoever has not said who it is, or was told that its job is over, and stays."""
        now_s = time.monotonic()
        self._epoll.modify(self._listener.fileno(), select.EPOLLIN)
        if now_s > self._begin_s and not self._jobs:
            self.trouble = Trouble("no worker came in time")
        self._stopped = self._stopped or self.trouble is not None or now_s > self._end_s
        for stranger in [one for one in self._strangers.values() if one.end_s < now_s]:
            self._turn_away(stranger, f"it did not say who it is within {HELLO_S:g} s")
        for job in [job for job in self._jobs.values() if job.late(now_s, FAREWELL_S)]:
            for member in list(job.members.values()):
                self._lose(member, "its job is over")


def _urgency(member: Member) -> tuple[int, int]:
    return member.lane, member.rank
