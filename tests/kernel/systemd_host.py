"""A host with a real systemd as PID 1 and a real udev, in namespaces and a root of its own.

Its end is that of one process, which takes all others with it; what it wrote was in memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from tests.netns import SLOWNESS, Namespace, alive, run
from tlsched import cgroups

BOOT = Path(__file__).with_name("systemd_boot.sh")
CHECKOUT = Path(__file__).parent.parent.parent
UDEVD = Path("/lib/systemd/systemd-udevd")
# Where `make setup` unpacks Debian's udev on a machine that has none.
UNPACKED_UDEV = Path(sys.prefix) / "udev"
NAMESPACES = ("--pid", "--mount", "--cgroup", "--net", "--uts", "--ipc")
BOOT_S = 60.0 * SLOWNESS


class SystemdHost(Namespace):
    """The booted host: run commands in it as in any namespace of the tests."""

    pid: int

    def __init__(self, pid: int) -> None:
        super().__init__(f"systemd of process {pid}")
        object.__setattr__(self, "pid", pid)  # a Namespace is frozen

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self.pid}/ns/net")

    def argv(self, *argv: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "-p", "-m", "-C", "-n", "-u", "-i", "--", *argv]

    def write(self, path: str, text: str) -> None:
        """Write a file of the host."""
        inside = Path(f"/proc/{self.pid}/root{path}")
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.write_text(text)

    def state(self, unit: str) -> str:
        """ "active", "inactive", "failed" and so on, once no job is waiting."""
        return self.run("systemctl", "is-active", unit, check=False).stdout.strip()

    def await_state(self, unit: str, wanted: str, wait_s: float = 30.0) -> None:
        """Wait until the unit is in a state; the error shows what it logged."""
        deadline_s = time.monotonic() + wait_s * SLOWNESS
        while (state := self.state(unit)) != wanted:
            assert time.monotonic() < deadline_s, f"{unit} is {state}: {self.journal(unit)}"
            time.sleep(0.05)

    def journal(self, unit: str) -> str:
        """What the unit logged."""
        self.run("journalctl", "--sync")
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout


@contextlib.contextmanager
def booted(work: Path) -> Iterator[SystemdHost]:
    """Boot a host; it ends with the context. ``work`` is an empty folder to mount over."""
    udev = "" if UDEVD.exists() else str(UNPACKED_UDEV)
    assert not udev or UNPACKED_UDEV.is_dir(), "udev is missing: run `make setup`"
    top = cgroups.find_mount().point
    for left in top.glob("tlt-*-systemd"):  # of a run that was killed
        if not alive(int(left.name.split("-")[1])):
            _remove(left)
    cgroup = top / f"tlt-{os.getpid()}-systemd"
    cgroup.mkdir()
    enter = f"echo $$ >{cgroup}/cgroup.procs; exec setpriv --pdeathsig KILL -- "
    enter += f"unshare --fork --kill-child {' '.join(NAMESPACES)} -- "
    purelib = sysconfig.get_path("purelib")
    enter += f'sh "{BOOT}" "{work}" "{udev}" "{CHECKOUT}" "{purelib}"'
    log = work.with_suffix(".log")
    with log.open("w") as out:
        outer = subprocess.Popen(["sh", "-c", enter], stdout=out, stderr=out)
    pid = 0
    try:
        pid = _await_boot(outer, log)
        yield SystemdHost(pid)
    finally:
        outer.kill()  # SIGTERM would be ignored by unshare
        outer.wait()
        _await_end(pid, cgroup)


def _await_boot(outer: subprocess.Popen[bytes], log: Path) -> int:
    """The first process's number, once systemd has reached its target."""
    deadline_s = time.monotonic() + BOOT_S
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    while True:
        assert outer.poll() is None, f"systemd did not start: {log.read_text()}"
        assert time.monotonic() < deadline_s, f"systemd is not up: {log.read_text()}"
        for pid in map(int, children.read_text().split()):
            host = SystemdHost(pid)
            if Path(f"/proc/{pid}/comm").read_text() == "systemd\n" and (
                host.state("test.target") == "active"
            ):
                return pid
        time.sleep(0.1)


def _await_end(pid: int, cgroup: Path) -> None:
    """Wait for the last process and remove the cgroups that systemd made."""
    deadline_s = time.monotonic() + 10 * SLOWNESS
    while pid and alive(pid):
        assert time.monotonic() < deadline_s, "systemd did not end"
        time.sleep(0.02)
    while not _remove(cgroup):
        assert time.monotonic() < deadline_s, f"{cgroup} cannot be removed"


def _remove(cgroup: Path) -> bool:
    """Remove a cgroup with those below it; False while a process is still ending in one."""
    run("find", str(cgroup), "-depth", "-type", "d", "-exec", "rmdir", "{}", ";", check=False)
    return not cgroup.is_dir()
