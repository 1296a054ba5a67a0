"""A cgroup for one command: made and marked before it starts, removed when it is empty.

The process that runs the command enters the cgroup and becomes the command, so nothing stands
between the two: signals, job control and exit code are the command's own. A small process in the
background (``sweep.py``) removes the cgroup, and with it the program that hangs on it, when the
last process has left it. It holds a lock on the cgroup's folder; a cgroup without that lock was
left behind by one that was killed, and the next run removes it when it is empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tlsched import cgroups
from tlsched.bands import Band
from tlsched.ebpf import tag
from tlsched.errors import FeatureMissing, HostError

PREFIX = "tlsched-run-"
_SWEEP = Path(__file__).parent / "sweep.py"


@dataclass(frozen=True, slots=True)
class Enclosure:
    """The cgroup of a run, which this process has not entered yet."""

    cgroup: Path

    def enter(self) -> None:
        """Move this process into it. Raises HostError when the kernel refuses."""
        try:
            (self.cgroup / "cgroup.procs").write_text("0")  # 0 is the writer
        except OSError as error:
            raise HostError(
                f"cannot move into the cgroup {self.cgroup}: {error.strerror}",
                hint="mark an existing cgroup with `tlsched mark` and start the command there",
            ) from error


@contextlib.contextmanager
def enclosure(lane: Band) -> Iterator[Enclosure]:
    """A new cgroup below this process's own, so that its limits still hold, and marked.

    It is removed when this process has left the block or become another program, and nobody is in
    it. Raises HostError and its kin, and leaves nothing then.
    """
    with tag.load(lane) as program:
        parent = cgroups.own()
        _remove_leftovers(parent)
        cgroup, lock_fd = _make_locked(parent)
        try:
            _require_domain(cgroup)
            tag.attach(program, cgroup)
            alive_fd = _start_sweeper(cgroup, lock_fd)
        except BaseException:
            cgroups.remove(cgroup)
            raise
        finally:
            os.close(lock_fd)
    try:
        yield Enclosure(cgroup)
    finally:
        os.close(alive_fd)


def _make_locked(parent: Path) -> tuple[Path, int]:
    """A new cgroup and the descriptor that locks it."""
    for number in itertools.count():
        cgroup = parent / f"{PREFIX}{os.getpid()}{f'-{number}' if number else ''}"
        try:
            cgroups.make(cgroup)
        except FileExistsError:  # of the same number in another pid namespace, or still in use
            continue
        fd = _lock_if_there(cgroup)
        if fd is not None:
            return cgroup, fd
    raise AssertionError  # the numbers do not end


def _lock_if_there(cgroup: Path) -> int | None:
    """The locked folder, or None when another run took it for a leftover and removed it."""
    try:
        fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        cgroups.lock(fd, cgroup)
        if os.path.samestat(os.fstat(fd), cgroup.stat()):
            return fd
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(fd)
        cgroups.remove(cgroup)
        raise
    os.close(fd)
    return None


def _require_domain(cgroup: Path) -> None:
    kind = (cgroup / "cgroup.type").read_text().strip()
    if kind != "domain":
        raise FeatureMissing(
            f"{cgroup.parent} is part of a threaded tree, below which no process can be moved",
            hint="start the command from another cgroup",
        )


def _start_sweeper(cgroup: Path, lock_fd: int) -> int:
    """Start sweep.py; it begins when the descriptor that is returned has been closed everywhere."""
    read_fd, write_fd = os.pipe()
    try:
        # -I and -S: without the environment's and the site's modules it starts quickly.
        subprocess.run(
            [sys.executable, "-I", "-S", str(_SWEEP), str(cgroup)],
            stdin=read_fd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock_fd],
            cwd="/",
            start_new_session=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(write_fd)
        raise HostError(
            f"cannot start the process that removes {cgroup} later: {error}",
            hint="tlsched starts it with its own Python: is that one whole?",
        ) from error
    finally:
        os.close(read_fd)
    return write_fd


def _remove_leftovers(parent: Path) -> None:
    """Remove runs' cgroups that are empty and have lost their sweeper."""
    for cgroup in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or locked: somebody looks after it
            fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                cgroups.remove(cgroup)
            finally:
                os.close(fd)
