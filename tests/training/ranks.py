"""Run a function on several ranks: real processes, real gloo, over loopback.

Starting torch takes seconds, so ranks are kept from one test to the next; each call gets a process
group of its own. A pool in which a rank failed is thrown away.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Body = Callable[..., Any]

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_context = multiprocessing.get_context("spawn")


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class RankPool:
    """``size`` processes that run what they are asked to, together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.broken = False
        self._results: multiprocessing.Queue[tuple[int, Any, str | None]] = _context.Queue()
        self._requests = [_context.Queue() for _ in range(size)]
        self.processes = [
            _context.Process(target=_serve, args=(rank, size, self._requests[rank], self._results))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def run(self, body: Body, *args: Any, timeout_s: float = 100.0, dying: int = 0) -> list[Any]:
        """``[body(rank, size, *args) for each rank]``; ``body`` must be importable.

        ``dying`` ranks may end without a result (None). Raises RankError with the first traceback,
        or naming the ranks that gave no result in time.
        """
        port = free_port()
        for requests in self._requests:
            requests.put((body, args, port))
        values: dict[int, Any] = {}
        self.broken = True
        end_s = time.monotonic() + timeout_s
        try:
            while len(values) < self.size - dying:
                rank, value, error = self._next_result(end_s, dying)
                if error is not None:
                    raise RankError(f"rank {rank}:\n{error}")
                values[rank] = value
        except queue.Empty:
            missing = sorted(set(range(self.size)) - set(values))
            raise RankError(f"ranks {missing} gave no result within {timeout_s} s") from None
        self.broken = dying > 0
        return [values.get(rank) for rank in range(self.size)]

    def _next_result(self, end_s: float, dying: int) -> tuple[int, Any, str | None]:
        """Raises queue.Empty at ``end_s``, or RankError once more than ``dying`` ranks are dead."""
        while True:
            dead = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
            left_s = end_s - time.monotonic()
            try:
                return self._results.get(timeout=max(0.0, min(1.0, left_s)))
            except queue.Empty:
                if len(dead) > dying:
                    raise RankError(f"ranks {dead} ended without a result") from None
                if left_s <= 0:
                    raise

    def close(self) -> None:
        """End the processes."""
        for requests in self._requests:
            requests.put(None)
        for process in self.processes:
            process.join(0 if self.broken else 10)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def fresh_ranks(size: int) -> Iterator[RankPool]:
    """A pool that no other test uses: for tests that break it."""
    pool = RankPool(size)
    try:
        yield pool
    finally:
        pool.broken = True
        pool.close()


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _serve(rank: int, size: int, requests: Any, results: Any) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also where the tests are killed
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
    )
    # Loopback carries no tree; what is said about that has a test of its own.
    warnings.filterwarnings("ignore", message="tlsched: the kernel does not order")
    while (request := requests.get()) is not None:
        body, args, port = request
        os.environ["MASTER_PORT"] = str(port)
        try:
            dist.init_process_group("gloo")
            results.put((rank, body(rank, size, *args), None))
            dist.destroy_process_group()
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
            return
