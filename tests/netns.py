"""Network namespaces for tests: made in a few lines, gone again whatever happens.

Names are ``tlt-<pid>-<n><letter>``, so that a later run can tell whose they were and remove
what a killed run left behind. Nothing here touches a namespace of anybody else.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

PREFIX = "tlt-"
# How much longer a command may take where the machine is emulated (make test-kernel-debian).
SLOWNESS = float(os.environ.get("TLT_SLOWNESS", "1"))
CLONE_NEWNET = 0x40000000  # <sched.h>; os.setns arrives with Python 3.12
NETNS_DIR = Path("/run/netns")

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)
_serial = itertools.count(1)


def run(
    *argv: str, timeout_s: float = 30.0, check: bool = True, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; when it fails, the error shows what it wrote to stderr."""
    limit_s = timeout_s * SLOWNESS
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=limit_s, check=False, input=stdin
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
    return done


def _enter(path: Path) -> None:
    """Move the calling thread into the namespace at ``path`` (setns(2))."""
    with path.open() as handle:
        if _libc.setns(handle.fileno(), CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))


@dataclass(frozen=True)
class Namespace:
    """A named network namespace. Its loopback is up."""

    name: str

    @property
    def path(self) -> Path:
        """Where iproute2 mounts it."""
        return NETNS_DIR / self.name

    def argv(self, *argv: str) -> list[str]:
        """``argv`` as a command that runs inside. The mounts stay (`ip netns exec` hides /sys)."""
        return ["nsenter", f"--net={self.path}", "--", *argv]

    def run(
        self, *argv: str, timeout_s: float = 30.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside and wait for it; AssertionError with its stderr when it fails."""
        return run(*self.argv(*argv), timeout_s=timeout_s, check=check)

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command inside. Whatever is left of it is killed with the namespace."""
        return subprocess.Popen(self.argv(*argv), text=True, **options)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``function`` inside and return its result; what it raises is raised here.

        It runs in a thread of its own (a namespace belongs to a thread), so a socket that it
        opens and returns stays inside and may be used from the test.
        ``ns.call(socket.create_server, ("10.99.0.1", 0))`` is all that is needed.
        Caution: /proc/net shows the main thread's namespace, /proc/thread-self/net this one.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                _enter(self.path)
                results.append(function(*args, **kwargs))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=inside, name=f"in-{self.name}")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def spawn(self, function: Callable[..., object], *args: Any) -> BaseProcess:
        """Start ``function`` in a forked child inside; killed with the namespace at the latest."""

        def inside() -> None:
            _enter(self.path)
            function(*args)

        process = multiprocessing.get_context("fork").Process(target=inside, daemon=True)
        process.start()
        return process


@dataclass(frozen=True)
class End(Namespace):
    """One end of a veth: a namespace, its interface, and its addresses without prefix length."""

    dev: str
    v4: str
    v6: str
    mac: str


@dataclass(frozen=True)
class Pair:
    """Two namespaces joined by a veth: ``a.dev`` to ``b.dev``, v4 /24 and v6 /64."""

    a: End
    b: End


def _fresh_name(letter: str) -> str:
    return f"{PREFIX}{os.getpid()}-{next(_serial)}{letter}"


def make_namespace(letter: str = "a") -> Namespace:
    """Make an empty namespace; end it with :func:`remove`."""
    namespace = Namespace(_fresh_name(letter))
    run("ip", "netns", "add", namespace.name)
    run("ip", "-n", namespace.name, "link", "set", "lo", "up")
    return namespace


def make_pair(dev: str = "eth0") -> Pair:
    """Make two namespaces joined by a veth whose ends are both called ``dev``, up, addressed.

    No link-local addresses are generated and each end knows the other's hardware address, so
    that an idle link carries no packet of its own and a first packet waits for no answer.
    """
    names = [make_namespace("a").name, make_namespace("b").name]
    macs = ["02:00:00:63:00:01", "02:00:00:63:00:02"]
    link = ["ip", "-n", names[0], "link", "add", dev, "address", macs[0], "type", "veth"]
    run(*link, "peer", "name", dev, "address", macs[1], "netns", names[1])
    ends = [
        End(name, dev, f"10.99.0.{host}", f"fd99::{host}", mac)
        for host, (name, mac) in enumerate(zip(names, macs, strict=True), start=1)
    ]
    for end, peer in (ends, reversed(ends)):
        _configure(end, peer)
    return Pair(*ends)


def _configure(end: End, peer: End) -> None:
    commands = (
        f"link set {end.dev} addrgenmode none",
        f"address add {end.v4}/24 dev {end.dev}",
        f"address add {end.v6}/64 dev {end.dev} nodad",
        f"link set {end.dev} up",
        f"neighbour add {peer.v4} lladdr {peer.mac} dev {end.dev}",
        f"neighbour add {peer.v6} lladdr {peer.mac} dev {end.dev}",
    )
    run("ip", "-n", end.name, "-batch", "-", stdin="\n".join(commands))


def remove(name: str) -> None:
    """Kill what runs inside the namespace, then delete it. Happy when it is gone already."""
    pids = run("ip", "netns", "pids", name, check=False)
    for pid in map(int, pids.stdout.split()):
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    run("ip", "netns", "delete", name, check=False)


def namespaces() -> set[str]:
    """Names of all named network namespaces of the machine."""
    return {path.name for path in NETNS_DIR.iterdir()} if NETNS_DIR.is_dir() else set()


def owner_pid(name: str) -> int | None:
    """The process that made a test's namespace, or None when it is not a test's."""
    match = re.fullmatch(rf"{PREFIX}(\d+)-\d+\w", name)
    return int(match[1]) if match else None


def alive(pid: int) -> bool:
    """Whether a process of this number exists."""
    return Path(f"/proc/{pid}").exists()


def remove_leftovers() -> None:
    """Remove namespaces of test runs that were killed: our prefix, owner dead."""
    for name in namespaces():
        pid = owner_pid(name)
        if pid is not None and not alive(pid):
            remove(name)
