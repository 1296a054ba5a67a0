"""One change of an interface at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest

from tlsched.errors import HostError
from tlsched.tc.lock import interface_lock

IFINDEX = 1_000_000 + os.getpid()


def hold(ready: multiprocessing.synchronize.Event) -> None:
    with interface_lock(IFINDEX, "eth0"):
        ready.set()
        time.sleep(30)


def test_the_second_waits_for_the_first() -> None:
    order: list[str] = []
    inside = threading.Event()

    def first() -> None:
        with interface_lock(IFINDEX, "eth0"):
            inside.set()
            time.sleep(0.2)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(5)
    with interface_lock(IFINDEX, "eth0"):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_whoever_waits_too_long_is_told_for_whom_and_a_killed_holder_lets_go() -> None:
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    holder = fork.Process(target=hold, args=(ready,))
    holder.start()
    try:
        assert ready.wait(5)
        with (
            pytest.raises(HostError, match=f"process {holder.pid} has been changing eth0"),
            interface_lock(IFINDEX, "eth0", wait_s=0.2),
        ):
            pass
    finally:
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
    with interface_lock(IFINDEX, "eth0", wait_s=5):
        pass


@pytest.mark.parametrize("rude", ["full backlog", "hangs up on all", "never listens"])
def test_whoever_holds_the_name_in_bad_faith_is_not_waited_for_longer(rude: str) -> None:
    name = f"\0tlsched/link/{IFINDEX}"
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(socket.socket(socket.AF_UNIX))
        holder.bind(name)
        if rude != "never listens":
            holder.listen(0)
        if rude == "full backlog":
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(name)
        if rude == "hangs up on all":
            holder.settimeout(0.05)
            thread = threading.Thread(target=hang_up, args=(holder, stop))
            thread.start()
            stack.callback(thread.join)
            stack.callback(stop.set)
        with pytest.raises(HostError, match="has been changing eth0"), waiting_briefly():
            pass


def waiting_briefly() -> contextlib.AbstractContextManager[None]:
    return interface_lock(IFINDEX, "eth0", wait_s=0.3)


def hang_up(holder: socket.socket, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            holder.accept()[0].close()
