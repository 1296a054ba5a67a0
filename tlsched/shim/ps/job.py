"""Job: the workers that train together, as a server sees them, and what becomes of them."""

from __future__ import annotations

import socket
import time

from tlsched.shim.ps.channel import Channel
from tlsched.shim.ps.line import Line, Sum
from tlsched.shim.ps.pool import Buffer, Pool
from tlsched.shim.ps.wire import HEAD, Head, Hello, Kind, Trouble

_GOODBYE = memoryview(bytearray())


class Member(Channel):
    """A worker's connection for one lane. ``position`` counts the segments that it has sent."""

    __slots__ = ("buffer", "job", "left", "line", "position", "rank")

    def __init__(self, sock: socket.socket, hello: Hello, job: Job) -> None:
        super().__init__(sock, hello.lane)
        self.rank = hello.rank
        self.job = job
        self.line = job.lines[hello.lane]
        self.position = 0
        self.left = False
        self.buffer: Buffer | None = None


class Job:
    """A job of ``hello``'s; its :class:`Member` s join and leave.

    ``stirred`` are members for which something may have changed: they may receive again, or have
    something to send. ``trouble`` is why it has ended.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.pool = Pool()
        self.lines = [Line(hello.workers, self.pool) for _ in range(hello.lanes)]
        self.members: dict[tuple[int, int], Member] = {}
        self.stirred: set[Member] = set()
        self.trouble: Trouble | None = None
        self._ended_s = 0.0
        self._waiting: list[set[Member]] = [set() for _ in self.lines]
        self._gone: list[dict[int, int]] = [{} for _ in self.lines]  # rank -> its last position

    def why_not(self, hello: Hello) -> str | None:
        """Why nobody may join with ``hello``, or None."""
        if self.trouble is not None:
            return f"the job has ended: {self.trouble.text}"
        ours = (self.hello.workers, self.hello.lanes)
        if (hello.workers, hello.lanes) != ours:
            return f"it says {hello.workers} workers and {hello.lanes} lanes, others {ours}"
        if (hello.rank, hello.lane) in self.members:
            return f"rank {hello.rank} has a connection for lane {hello.lane} already"
        return None

    def join(self, member: Member) -> None:
        """Take ``member`` in and welcome it."""
        self.members[member.rank, member.lane] = member
        member.post(Head(Kind.WELCOME, 0, 0, 0, 0, 0, 0).pack())
        self.stirred.add(member)

    def leave(self, member: Member, how: str) -> None:
        """``member``'s connection has ended; without a goodbye that ends the job."""
        del self.members[member.rank, member.lane]
        self._waiting[member.lane].discard(member)
        self.stirred.discard(member)
        if not member.left and self.trouble is None:
            self.end(Trouble(f"rank {member.rank} left ({how})", member.rank, gone=True))

    def end(self, trouble: Trouble) -> None:
        """Tell all why nothing more comes. What they still send is not heard."""
        self.trouble, self._ended_s = trouble, time.monotonic()
        record = trouble.record()
        for member in self.members.values():
            member.drop_unsent()
            member.post(record[: HEAD.size], record[HEAD.size :])
            self.stirred.add(member)

    def place(self, channel: Channel) -> memoryview | None:
        """Where the payload of the record that ``channel`` begins goes, or None for not yet."""
        assert isinstance(channel, Member)
        member, line = channel, channel.line
        if member.head[0] == Kind.BYE:
            return _GOODBYE
        if not line.open_for(member.position):
            self._waiting[member.lane].add(member)
            return None
        length = line.announce(member.rank, member.position, bytes(member.head))
        member.buffer = self.pool.take()
        return member.buffer.view[:length]

    def arrived(self, member: Member) -> None:
        """``member`` has sent a whole record."""
        line, buffer = member.line, member.buffer
        if buffer is None:
            self._say_goodbye(member)
            return
        member.buffer = None
        position, done = member.position, line.done
        member.position += 1
        for ready in line.arrive(member.rank, position, buffer):
            self._send_back(member.lane, ready)
        if line.done != done:
            self._stir(member.lane)
        self._check_partners(member)

    def is_paused(self, member: Member) -> bool:
        """Whether ``member`` is too far ahead to be heard just now."""
        return member in self._waiting[member.lane]

    def late(self, now_s: float, limit_s: float) -> bool:
        """Whether it ended more than ``limit_s`` ago."""
        return self.trouble is not None and now_s > self._ended_s + limit_s

    def _send_back(self, lane: int, ready: Sum) -> None:
        total, line, counts = ready.total, self.lines[lane], not ready.hold
        assert total is not None
        ranks = range(self.hello.workers)
        receivers = [m for rank in ranks if (m := self.members.get((rank, lane))) is not None]
        total.users = len(receivers)
        line.unsent += counts

        def sent() -> None:
            total.users -= 1
            if not total.users:
                self.pool.give(total)
                line.unsent -= counts
                self._stir(lane)

        payload = total.view[: ready.length]
        for member in receivers:
            member.post(ready.head, payload, sent=sent)
            self.stirred.add(member)

    def _stir(self, lane: int) -> None:
        """Those that wait in ``lane`` may go on."""
        if self._waiting[lane]:
            self.stirred |= self._waiting[lane]
            self._waiting[lane].clear()

    def _say_goodbye(self, member: Member) -> None:
        member.left = True
        self._gone[member.lane][member.rank] = member.position
        for other in self.members.values():
            if other.lane == member.lane:
                self._check_partners(other)

    def _check_partners(self, member: Member) -> None:
        """Whoever said goodbye sends nothing more: ``member`` must not wait for it."""
        for rank, position in self._gone[member.lane].items():
            if position < member.position and self.trouble is None:
                self.end(Trouble(f"rank {rank} left", rank, gone=True))
