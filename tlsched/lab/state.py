"""Which labs exist, and who owns them: one JSON file a lab under /run/tlsched/lab.

The file is written before the first namespace and removed after the last, so that a lab whose
owner was killed at any moment can be found and removed by the next user. /run is emptied by a
reboot, as are the namespaces.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tlsched.errors import LabError
from tlsched.lab.topology import Topology

STATE_DIR = Path("/run/tlsched/lab")
_LOCK_WAIT_S = 60.0
_held = threading.local()


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its pid and its start time in clock ticks since boot (proc(5), stat field 22)."""

    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls(os.getpid(), _start_ticks(os.getpid()) or 0)

    def alive(self) -> bool:
        """Whether that very process still runs; another one with its pid does not count."""
        return _start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class Record:
    """A lab as its file describes it. Without an owner it stays until `tlsched lab down`.

    ``builder`` is the process that builds it, until it has finished.
    """

    topology: Topology
    owner: Owner | None
    builder: Owner | None = None

    @property
    def path(self) -> Path:
        """The lab's file."""
        return STATE_DIR / f"{self.topology.name}.json"

    def orphaned(self) -> bool:
        """Whether the owner has gone without removing its lab, or the builder without finishing."""
        return self.unfinished() or (self.owner is not None and not self.owner.alive())

    def unfinished(self) -> bool:
        """Whether the builder was killed half-way: the hosts cannot be used."""
        return self.builder is not None and not self.builder.alive()

    def save(self) -> None:
        """Write the file; a reader sees the old one or the new one, never a part."""
        STATE_DIR.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(self.path)

    def remove(self) -> None:
        """Delete the file, if it is there."""
        self.path.unlink(missing_ok=True)


def records() -> list[Record]:
    """All labs of this machine, by name."""
    found = []
    for path in sorted(STATE_DIR.glob("*.json")):
        record = _load(path)
        if record is not None:
            found.append(record)
    return found


def find(name: str) -> Record | None:
    """The lab called ``name``, if there is one."""
    return next((record for record in records() if record.topology.name == name), None)


@contextmanager
def locked() -> Iterator[None]:
    """One builder or remover of labs at a time on this machine.

    Raises LabError when another one holds the lock for longer than a minute.
    """
    STATE_DIR.mkdir(parents=True, exist_ok=True)
    handle = os.open(STATE_DIR / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end_s = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(handle):
            if time.monotonic() > end_s:
                raise LabError(
                    f"another lab has been in the making for {_LOCK_WAIT_S:.0f} s",
                    hint=f"see who holds {STATE_DIR}/.lock",
                )
            time.sleep(0.02)
        _held.handles = (handle,)
        yield
    finally:
        _held.handles = ()
        os.close(handle)


def lock_handles() -> tuple[int, ...]:
    """The lock's file descriptor, if this thread holds it, for its children to inherit.

    If the builder is killed while `ip` still makes namespaces for it, the lock stays held until
    that `ip` has ended, so that nobody cleans up before the last namespace is there.
    """
    return getattr(_held, "handles", ())


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load(path: Path) -> Record | None:
    try:
        raw = json.loads(path.read_text())
        owner = Owner(**raw["owner"]) if raw["owner"] else None
        builder = Owner(**raw["builder"]) if raw.get("builder") else None
        return Record(Topology(**raw["topology"]), owner, builder)
    except FileNotFoundError:  # removed meanwhile
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(
            f"{path} does not describe a lab ({error})", hint="remove the file, then try again"
        ) from None


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name, in brackets, and may itself hold spaces or brackets.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
