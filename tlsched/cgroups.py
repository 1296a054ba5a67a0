"""The tree of cgroups, version 2: where it is mounted, its cgroups, and who is in them.

Where cgroup v1 is in use beside it (a hybrid host), version 2 is mounted at some other place than
/sys/fs/cgroup, so the place is read from the mount table, never assumed. Sources: cgroups(7),
proc_pid_mountinfo(5), Documentation/admin-guide/cgroup-v2.rst of the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tlsched.errors import ConfigError, FeatureMissing, HostError, PermissionMissing

_MOUNTINFO = Path("/proc/self/mountinfo")
_OWN = Path("/proc/self/cgroup")
LOCK_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount of the tree: cgroup ``root`` is visible at the folder ``point``.

    ``root`` is "/" unless only a part of the tree is mounted; ``device`` is the st_dev of every
    file in it.
    """

    point: Path
    root: PurePosixPath
    device: int

    @property
    def visible(self) -> bool:
        """Whether it can be reached, and is not covered by a later mount."""
        try:
            return self.point.stat().st_dev == self.device
        except OSError:
            return False

    def path_of(self, name: str) -> Path | None:
        """The folder of the cgroup that /proc/PID/cgroup calls ``name``; None outside the mount."""
        try:
            below = PurePosixPath(name).relative_to(self.root)
        except ValueError:
            return None
        return None if ".." in below.parts else self.point / below


def parse_mounts(mountinfo: str) -> tuple[Mount, ...]:
    """The cgroup v2 mounts in a text like /proc/self/mountinfo, the widest view first.

    Several are possible (containers); one that shows the whole tree is the most useful.
    """
    mounts = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or after.split(" ")[0] != "cgroup2" or len(fields) < 6:
            continue
        major, minor = map(int, fields[2].split(":"))
        root, point = map(_unescape, fields[3:5])
        mounts.append(Mount(Path(point), PurePosixPath(root), os.makedev(major, minor)))
    return tuple(sorted(mounts, key=lambda mount: len(mount.root.parts)))


def find_mount() -> Mount:
    """Where cgroup v2 is mounted. Raises FeatureMissing where it is not, or is hidden."""
    mounts = parse_mounts(_MOUNTINFO.read_text(errors="surrogateescape"))
    for mount in mounts:
        if mount.visible:
            return mount
    hidden = (
        f"cgroup v2 is mounted at {mounts[0].point}, but another mount hides it" if mounts else ""
    )
    raise FeatureMissing(
        hidden or "cgroup v2 is not mounted",
        hint="mount it (mount -t cgroup2 none FOLDER); under `ip netns exec`, which takes the"
        " machine's /sys away, use `nsenter --net=/run/netns/NAME` instead",
    )


def find(text: str) -> Path:
    """The folder of the cgroup that somebody calls ``text``.

    That is its folder, or its name as /proc/PID/cgroup and `systemctl show -P ControlGroup` give
    it ("/system.slice/ssh.service"). Raises ConfigError when there is no such cgroup.
    """
    mount = find_mount()
    literal = Path(text)
    for path in (literal, mount.path_of(f"/{text.strip('/')}")):
        if text and path is not None and _is_cgroup(path, mount):
            return path.resolve()
    if text and os.path.isdir(text):
        raise ConfigError(f"{text} is no cgroup of version 2", hint=f"name one below {mount.point}")
    raise ConfigError(
        f'there is no cgroup "{text}"',
        hint=f"give a folder below {mount.point}, or a name as in /proc/PID/cgroup",
    )


def own() -> Path:
    """The folder of this process's own cgroup. Raises FeatureMissing when it cannot be seen."""
    mount = find_mount()
    name = next((line[3:] for line in _OWN.read_text().splitlines() if line.startswith("0::")), "")
    path = mount.path_of(name)
    if path is None or not _is_cgroup(path, mount):
        raise FeatureMissing(
            f"this process's cgroup {name or 'of version 2'} is not below {mount.point}",
            hint="mount cgroup v2 inside the container's own cgroup namespace",
        )
    return path


def is_top(cgroup: Path) -> bool:
    """Whether it is the root of the whole tree, in which every process is."""
    # Every other cgroup has a type; one that is gone has no file at all.
    return (cgroup / "cgroup.procs").exists() and not (cgroup / "cgroup.type").exists()


def cgroup_id(cgroup: Path) -> int:
    """The number by which the kernel and BPF programs know it (on 64-bit machines, its inode's)."""
    return cgroup.stat().st_ino


def walk(top: Path) -> Iterator[Path]:
    """A cgroup and all below it, parents first; what vanishes meanwhile is left out."""
    for folder, _, _ in os.walk(top):
        yield Path(folder)


def processes(cgroup: Path) -> tuple[int, ...]:
    """The processes in the cgroup itself; 0 stands for one of another pid namespace."""
    try:
        return tuple(map(int, (cgroup / "cgroup.procs").read_text().split()))
    except OSError:  # gone, or threaded: then its domain has the processes
        return ()


def populated(cgroup: Path) -> bool:
    """Whether a process is in the cgroup or below it."""
    try:
        return "populated 1" in (cgroup / "cgroup.events").read_text()
    except OSError:  # gone
        return False


def make(cgroup: Path) -> None:
    """Make a cgroup below an existing one.

    Raises FileExistsError when it is there already, PermissionMissing when this process may not,
    HostError for whatever else the kernel says.
    """
    try:
        cgroup.mkdir()
    except FileExistsError:
        raise
    except PermissionError as error:
        raise PermissionMissing(
            f"no permission to make a cgroup in {cgroup.parent}",
            hint="run it as root, or as the owner of that folder",
        ) from error
    except OSError as error:  # read-only in a container, or too many (cgroup.max.descendants)
        raise HostError(
            f"cannot make a cgroup in {cgroup.parent}: {error.strerror}",
            hint="mark an existing cgroup from outside with `tlsched mark`",
        ) from error


def remove(cgroup: Path) -> bool:
    """Remove a cgroup and those below it; False, and nothing is removed, when one is in use."""
    if populated(cgroup):
        return False
    for folder in reversed(list(walk(cgroup))):
        with contextlib.suppress(OSError):  # gone, or busy: the check below tells
            folder.rmdir()
    return not cgroup.exists()


def lock(fd: int, cgroup: Path, wait_s: float = LOCK_WAIT_S) -> None:
    """Lock an open file of the cgroup until ``fd`` closes, however that happens (flock(2)).

    Raises HostError when somebody holds it for ``wait_s`` seconds: any user may.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise HostError(
                    f"somebody has kept {cgroup} locked for {wait_s:g} s",
                    hint="`lslocks` shows who; wait for it, or end it, and try again",
                ) from None
            time.sleep(0.02)
        else:
            return


def _is_cgroup(path: Path, mount: Mount) -> bool:
    try:
        return path.is_dir() and path.stat().st_dev == mount.device
    except OSError:
        return False


def _unescape(field: str) -> str:
    """Space, tab, newline and backslash are octal in the mount table (proc_pid_mountinfo(5))."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
