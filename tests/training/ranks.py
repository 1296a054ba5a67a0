"""Run a function on several ranks: real processes, real gloo, over loopback or inside a lab."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Body = Callable[..., Any]


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


def run_ranks(
    body: Body,
    size: int,
    *args: Any,
    timeout_s: float = 120.0,
    interface: str = "lo",
    expect_dead: tuple[int, ...] = (),
) -> list[Any]:
    """``[body(rank, size, *args) for each rank]``, each in a process of its own.

    ``body`` must be importable. Ranks in ``expect_dead`` may end without a result (None).
    Raises RankError with the first traceback, or naming the ranks that did not end in time.
    """
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, Any, str | None]] = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(body, rank, size, port, interface, results, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    try:
        while len(values) < size - len(expect_dead):
            rank, value, error = results.get(timeout=timeout_s)
            if error is not None:
                raise RankError(f"rank {rank}:\n{error}")
            values[rank] = value
        for rank, process in enumerate(processes):
            if rank not in expect_dead:
                process.join(timeout_s)
                assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
    except queue.Empty:
        missing = sorted(set(range(size)) - set(values))
        raise RankError(f"ranks {missing} gave no result within {timeout_s} s") from None
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [values.get(rank) for rank in range(size)]


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _rank(
    body: Body, rank: int, size: int, port: int, interface: str, results: Any, args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME=interface,
    )
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="tlsched: the kernel does not order")
    try:
        dist.init_process_group("gloo")
        value = body(rank, size, *args)
        results.put((rank, value, None))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        results.close()
        results.join_thread()
