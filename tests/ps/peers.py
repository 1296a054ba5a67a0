"""Workers as bare sockets, and a server in a thread: what the wire carries, byte by byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tlsched.shim.ps.listening import listen
from tlsched.shim.ps.server import Server
from tlsched.shim.ps.wire import HEAD, Head, Hello, Kind, Trouble, key_of, read_trouble, unpack

JOB = b"a job of sixteen"
FLOAT32 = 0


class Worker:
    """A connection to a server, which says hello."""

    def __init__(self, port: int, hello: Hello) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.sock.sendall(hello.pack())

    def welcomed(self) -> Worker:
        """After the server's welcome."""
        assert self.head().kind == Kind.WELCOME
        return self

    def head(self) -> Head:
        """The next record's head."""
        return unpack(self.exactly(HEAD.size))

    def exactly(self, size: int) -> bytes:
        """``size`` bytes; ConnectionError at the end of the stream."""
        parts = bytearray()
        while len(parts) < size:
            part = self.sock.recv(size - len(parts))
            if not part:
                raise ConnectionError("closed")
            parts += part
        return bytes(parts)

    def push(self, payload: bytes, *, number: int = 0, hold: int = 0, code: int = FLOAT32) -> None:
        """Send a segment that is a whole sum."""
        length = len(payload)
        self.sock.sendall(
            Head(Kind.SEGMENT, code, hold, length, number, 0, length).pack() + payload
        )

    def pull(self) -> bytes:
        """The next sum."""
        head = self.head()
        assert head.kind == Kind.SEGMENT
        return self.exactly(head.length)

    def trouble(self) -> Trouble:
        """The trouble that comes next."""
        head = self.head()
        assert head.kind == Kind.TROUBLE
        return read_trouble(self.exactly(head.length))


def hello(rank: int, workers: int, *, lane: int = 0, lanes: int = 1, token: str = "") -> Hello:
    """Of an unmarked lane."""
    return Hello(JOB, key_of(token), rank, workers, lane, lanes)


@dataclass
class Serving:
    """A server in a thread, and what it said."""

    server: Server
    port: int
    said: list[str] = field(default_factory=list)

    def workers(self, count: int) -> list[Worker]:
        """All workers of a job, welcomed."""
        found = [Worker(self.port, hello(rank, count)) for rank in range(count)]
        return [worker.welcomed() for worker in found]


@contextlib.contextmanager
def serving(token: str = "") -> Iterator[Serving]:
    """A server on loopback."""
    listener = listen(("127.0.0.1", 0))
    said: list[str] = []
    server = Server(listener, key_of(token), said.append)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield Serving(server, listener.getsockname()[1], said)
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()
