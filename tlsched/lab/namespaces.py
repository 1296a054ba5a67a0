"""Working in a network namespace, and ending what runs there.

A namespace is entered with setns(2) on a thread of its own, and by nsenter(1) for programs:
``ip netns exec`` would mount a fresh /sys over the machine's (ip-netns(8)), and hide bpffs and
the cgroup tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tlsched.errors import LabError

NETNS_DIR = Path("/run/netns")
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_SIOCETHTOOL = 0x8946  # linux/sockios.h
_ETHTOOL_SGRO = 0x2C  # linux/ethtool.h
# ETHTOOL_GRXCSUM and so on, ibid.
_OFFLOADS = {"rx": 0x14, "tx": 0x16, "sg": 0x18, "tso": 0x1E, "gso": 0x23, "gro": 0x2B}

T = TypeVar("T")


def inside(namespace: str, action: Callable[[], T]) -> T:
    """Run ``action`` in ``namespace`` and return its result; its exception is raised here.

    The thread ends with the action, so the caller's own namespace never changes.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            _enter(namespace)
            result.append(action())
        except BaseException as error:  # handed to the caller, whatever it is
            failure.append(error)

    thread = threading.Thread(target=work, name=f"in {namespace}", daemon=True)
    thread.start()
    thread.join(timeout=20)
    if failure:
        raise failure[0]
    if not result:
        raise LabError(
            f"an action in namespace {namespace} did not end within 20 s",
            hint="look at the machine's load, then run `tlsched lab down`",
        )
    return result[0]


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists from Python 3.12 on only
    handle = os.open(NETNS_DIR / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), namespace)
    finally:
        os.close(handle)


def enable_gro(*devices: str) -> None:
    """Switch generic receive offload on for ``devices`` of the current namespace.

    A veth with GRO receives by NAPI from one ring. Without, every packet goes to the backlog of
    the CPU that sent it, and packets of one flow overtake each other when the sender moves
    between CPUs: TCP then retransmits what was never lost (drivers/net/veth.c, veth_forward_skb).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for device in devices:
            value = ctypes.create_string_buffer(struct.pack("II", _ETHTOOL_SGRO, 1))
            request = struct.pack("16sQ16x", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, _SIOCETHTOOL, request)


def offloads(device: str) -> dict[str, bool]:
    """Which offloads ``device`` of the current namespace has switched on (ethtool -k's)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name, command in _OFFLOADS.items():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sQ16x", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, _SIOCETHTOOL, request)
            found[name] = bool(struct.unpack("II", value.raw[:8])[1])
    return found


def processes(namespaces: Iterable[str]) -> list[int]:
    """The processes, other than this one, whose network namespace is one of ``namespaces``."""
    wanted = _identities(namespaces)
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _network(pid) in wanted]


def end_processes(namespaces: Iterable[str], *, grace_s: float = 2.0) -> list[int]:
    """End every process of ``namespaces``: SIGTERM, and SIGKILL after ``grace_s`` seconds.

    Returns the processes that are still there after as long again (normally none).
    """
    names = list(namespaces)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not (handles := _open(names)):
            return []
        try:
            for handle in handles.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            _wait(handles.values(), grace_s)
        finally:
            for handle in handles.values():
                os.close(handle)
    return processes(names)


def _open(namespaces: Iterable[str]) -> dict[int, int]:
    """pid -> pidfd. The namespace is read again afterwards, since a pid may be reused meanwhile."""
    wanted = _identities(namespaces)
    handles = {}
    for pid in processes(namespaces):
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        if _network(pid) in wanted:
            handles[pid] = handle
        else:
            os.close(handle)
    return handles


def _wait(handles: Iterable[int], seconds: float) -> None:
    """Until every process has ended (its pidfd is readable) or ``seconds`` have passed."""
    end_s = time.monotonic() + seconds
    poll = select.poll()
    left = set(handles)
    for handle in left:
        poll.register(handle, select.POLLIN)
    while left and (rest_s := end_s - time.monotonic()) > 0:
        for handle, _ in poll.poll(rest_s * 1000):
            poll.unregister(handle)
            left.discard(handle)


def _identities(namespaces: Iterable[str]) -> set[tuple[int, int]]:
    found = set()
    for name in namespaces:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(NETNS_DIR / name)
            found.add((status.st_dev, status.st_ino))
    return found


def _network(pid: int) -> tuple[int, int] | None:
    try:
        status = os.stat(f"/proc/{pid}/ns/net")
    except OSError as error:  # ended meanwhile, a zombie, or not ours to look at
        if error.errno in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):
            return None
        raise
    return status.st_dev, status.st_ino
