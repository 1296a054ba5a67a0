"""TCP flows between two namespaces, each with its marks, and the bytes that arrive of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.netns import End, Pair
from tlsched.bands import Band
from tlsched.tc.kernel import Kernel
from tlsched.tc.tree import INNER_CLASSID

CHUNK = bytes(256 * 1024)
LIMIT_S = 60.0  # a sender ends by itself


@dataclass(frozen=True)
class Flow:
    """One running TCP flow; ``received`` counts the bytes that arrived."""

    received: ctypes.c_uint64

    def rate_bps(self, seconds: float) -> float:
        """Goodput over the next ``seconds``."""
        return rates_bps([self], seconds)[0]


def rates_bps(flows: Sequence[Flow], seconds: float) -> list[float]:
    """Goodput of several flows over the same ``seconds``."""
    start_s = time.monotonic()
    before = [flow.received.value for flow in flows]
    time.sleep(seconds)
    after = [flow.received.value for flow in flows]
    taken_s = time.monotonic() - start_s
    return [(b - a) * 8 / taken_s for a, b in zip(before, after, strict=True)]


def link_rate_bps(end: End, seconds: float) -> float:
    """What the link class of ``end``'s tree sends over the next ``seconds``, headers included."""

    def sent_bytes() -> tuple[float, int]:
        with Kernel() as kernel:
            seen = kernel.read(end.dev)
            return time.monotonic(), seen.class_stats[INNER_CLASSID].bytes

    start_s, before = end.call(sent_bytes)
    time.sleep(seconds)
    end_s, after = end.call(sent_bytes)
    return (after - before) * 8 / (end_s - start_s)


def mark(sock: socket.socket, band: Band | None) -> None:
    """Give a socket a lane's marks: TOS first, since it overwrites the priority (socket(7))."""
    if band is None or band.priority is None or band.tos is None:
        return
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, band.tos)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, band.priority)


@contextmanager
def flow(pair: Pair, band: Band | None, classid: int | None = None) -> Iterator[Flow]:
    """A bulk TCP flow from ``pair.a`` to ``pair.b`` in ``band``, or in class ``classid``."""
    server = pair.b.call(socket.create_server, (pair.b.v4, 0))
    port = server.getsockname()[1]
    # Neither lock nor event: the processes are killed, and could die holding either.
    running = Flow(multiprocessing.RawValue(ctypes.c_uint64, 0))
    receiver = pair.b.spawn(_receive, server, running.received)
    sender = pair.a.spawn(_send, (pair.b.v4, port), band, classid)
    server.close()
    try:
        yield running
    finally:
        for process in (sender, receiver):
            process.kill()
            process.join()


def _send(peer: tuple[str, int], band: Band | None, classid: int | None) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    with socket.create_connection(peer, timeout=5) as sock:
        # One congestion control everywhere, also where the machine's default paces below the rate.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        mark(sock, band)
        if classid is not None:  # straight to the class: needs CAP_NET_ADMIN
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, classid)
        sock.settimeout(LIMIT_S)
        while time.monotonic() < deadline_s:
            sock.sendall(CHUNK)


def _receive(server: socket.socket, received: ctypes.c_uint64) -> None:
    server.settimeout(10)
    sock, _ = server.accept()
    buffer = bytearray(1 << 20)
    with sock:
        sock.settimeout(LIMIT_S)
        while size := sock.recv_into(buffer):
            received.value += size
