"""Cgroups for tests: made at the top of the tree, emptied and removed whatever happens.

Names are ``tlt-<pid>-<n>``, as those of the namespaces in ``netns.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tlsched import cgroups

_serial = itertools.count(1)


@contextlib.contextmanager
def cgroup() -> Iterator[Path]:
    """An empty cgroup; whoever is left in it or below it at the end is killed."""
    path = cgroups.find_mount().point / f"tlt-{os.getpid()}-{next(_serial)}"
    cgroups.make(path)
    try:
        yield path
    finally:
        empty(path)
        assert cgroups.remove(path)


def empty(path: Path) -> None:
    """Kill everybody in the cgroup and below it, and wait until they are gone."""
    for below in cgroups.walk(path):
        for pid in cgroups.processes(below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    eventually(lambda: not cgroups.populated(path), f"{path} is empty")


def inside(path: Path, *argv: str) -> list[str]:
    """``argv`` as a command that runs in the cgroup from its first instruction on."""
    return ["sh", "-c", 'echo 0 >"$0"/cgroup.procs && exec "$@"', str(path), *argv]


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait until ``condition`` holds; AssertionError that says ``what`` did not become so."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def foreign_program() -> Iterator[int]:
    """Descriptor of somebody else's SOCK_OPS program, which answers 1 and does nothing."""
    code = bytes.fromhex("b700000001000000 9500000000000000")
    load = ctypes.CDLL("libbpf.so.1").bpf_prog_load
    sock_ops = 13
    fd = load(sock_ops, b"other_sockops", b"GPL", code, ctypes.c_size_t(2), None)
    assert fd >= 0
    try:
        yield fd
    finally:
        os.close(fd)


def hang(program_fd: int, path: Path, flags: int) -> int:
    """Attach a SOCK_OPS program as somebody else would, with these flags; 0 or a negative errno."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return int(ctypes.CDLL("libbpf.so.1").bpf_prog_attach(program_fd, fd, 3, flags))
    finally:
        os.close(fd)


def shown(path: Path) -> list[str]:
    """Names of the SOCK_OPS programs on the cgroup, as bpftool tells them."""
    argv = ["bpftool", "cgroup", "show", str(path)]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[-1] for line in lines if "sock_ops" in line]
