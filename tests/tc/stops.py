"""For how long a link delivers nothing while somebody sends all the time."""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from types import TracebackType

from tests.netns import Pair
from tests.tc.traffic import mark
from tlsched.bands import Band

INTERVAL_S = 0.0005
MOST_PACKETS = 2_000_000
SO_TIMESTAMPNS = 35  # <asm-generic/socket.h>; the kernel's clock, so a late reader does not count
NUMBER = struct.Struct("=Q")
TIMESPEC = struct.Struct("=qq")


class Stops:
    """Numbered UDP packets from ``pair.a`` to ``pair.b`` while it is open.

    ``longest_s`` is the longest time from the sending of a packet until it, or the first one
    after it, arrived; ``sent`` and ``lost`` count packets.
    """

    def __init__(self, pair: Pair, band: Band | None) -> None:
        self._pair, self._band = pair, band
        self._sent_ns = multiprocessing.RawArray(ctypes.c_uint64, MOST_PACKETS)
        self._came_ns = multiprocessing.RawArray(ctypes.c_uint64, MOST_PACKETS)
        self._count = multiprocessing.RawValue(ctypes.c_uint64, 0)
        self._stop = multiprocessing.RawValue(ctypes.c_bool, False)
        self._processes: list[BaseProcess] = []
        self.longest_s, self.sent, self.lost = 0.0, 0, 0

    def __enter__(self) -> Stops:
        receiver = self._pair.b.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind((self._pair.b.v4, 0))
        receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        peer = receiver.getsockname()
        self._processes = [
            self._pair.b.spawn(self._receive, receiver),
            self._pair.a.spawn(self._send, peer),
        ]
        receiver.close()
        time.sleep(0.3)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        time.sleep(0.3)
        self._stop.value = True
        for process in self._processes:
            process.join(10)
            process.kill()
        self.sent = self._count.value
        self.lost = sum(not came for came in self._came_ns[: self.sent])
        self.longest_s = longest_stop_s(self._sent_ns[: self.sent], self._came_ns[: self.sent])

    def _send(self, peer: tuple[str, int]) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            mark(sock, self._band)
            while not self._stop.value and self._count.value < MOST_PACKETS:
                number = self._count.value
                self._sent_ns[number] = time.time_ns()
                sock.sendto(NUMBER.pack(number), peer)
                self._count.value = number + 1
                time.sleep(INTERVAL_S)

    def _receive(self, sock: socket.socket) -> None:
        sock.settimeout(0.5)
        while True:
            try:
                data, ancillary, *_ = sock.recvmsg(64, 128)
            except TimeoutError:
                if self._stop.value:
                    return
                continue
            seconds, nanoseconds = TIMESPEC.unpack(ancillary[0][2])
            self._came_ns[NUMBER.unpack(data)[0]] = seconds * 10**9 + nanoseconds


def longest_stop_s(sent_ns: Sequence[int], came_ns: Sequence[int]) -> float:
    """The longest wait for news: 0 in ``came_ns`` stands for a packet that never came."""
    longest_ns, since_ns = 0, None
    for sent, came in zip(sent_ns, came_ns, strict=True):
        since_ns = sent if since_ns is None else since_ns
        if came:
            longest_ns, since_ns = max(longest_ns, came - since_ns), None
    return longest_ns / 1e9
