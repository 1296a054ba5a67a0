"""Marks for programs that cannot be changed: by the cgroup that their sockets belong to.

A cgroup that is marked gives each TCP connection made or accepted in it one lane's marks. What a
connection got when it was opened it keeps; of several cgroups around it the innermost decides.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlsched import cgroups
from tlsched.bands import DEFAULT_DSCPS, LANE_COUNT, Band, lane_bands
from tlsched.ebpf import compiler, tag
from tlsched.errors import ApplyError, ConfigError, PermissionMissing


@dataclass(frozen=True, slots=True)
class Marking:
    """A marked cgroup: the lane and marks that it gives, and how many processes are in it.

    They are None when another version of tlsched marked it and they cannot be read; ``lane`` also
    when the priority is no lane's. ``processes`` counts those of the cgroups below it too.
    """

    cgroup: str
    lane: int | None
    priority: int | None
    dscp: int | None
    processes: int

    def as_dict(self) -> dict[str, Any]:
        """The marking as the command line prints it with --json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What mark or unmark did, or in a dry run would do.

    ``result`` is "marked", "changed", "unmarked" or "unchanged"; ``lane`` the one before for
    unmark. ``processes`` are in the cgroup already: their open connections stay as they are.
    """

    cgroup: str
    result: str
    lane: int | None
    processes: int
    dry_run: bool

    def as_dict(self) -> dict[str, Any]:
        """The outcome as the command line prints it with --json."""
        return asdict(self)


def lane_band(lane: int, dscps: tuple[int, ...] | None = None) -> Band:
    """The marks of a lane, by default with the code points that the attached links go by.

    Those are read where this may be done (CAP_SYS_ADMIN); where nothing is attached they are
    tlsched's own. Raises ConfigError for a lane that is none, and when links disagree.
    """
    if not 0 <= lane < LANE_COUNT:
        raise ConfigError(
            f"there is no lane {lane}", hint=f"use 0 to {LANE_COUNT - 1}; 0 is the most urgent"
        )
    return lane_bands(_dscps_in_use() if dscps is None else dscps)[lane]


def mark(cgroup: Path, lane: Band, *, dry_run: bool = False) -> Outcome:
    """Let the cgroup's new connections have a lane's marks. Does nothing when they have already.

    Another lane replaces the one before at once. Raises HostError and its kin before anything is
    changed, ApplyError when somebody undid it.
    """
    if cgroups.is_top(cgroup):
        raise ConfigError(
            f"{cgroup} is the top of the tree: every process of the machine is below it",
            hint="name the cgroup of the programs that the lane is for",
        )
    with _lock(cgroup), tag.load(lane) as program:
        before = tag.tags_on(cgroup)
        result = "changed" if before else "marked"
        if [(each.digest, *_marks(each)) for each in before] == [
            (program.tag, lane.priority, lane.dscp)
        ]:
            result = "unchanged"
        elif not dry_run:
            _hang(program, cgroup, before)
        return _outcome(cgroup, result, lane.order, dry_run)


def unmark(cgroup: Path, *, dry_run: bool = False) -> Outcome:
    """Take tlsched's program off the cgroup, and no other. Does nothing where there is none.

    Connections that are open keep their marks until they close. Raises HostError and its kin.
    """
    with _lock(cgroup):
        before = tag.tags_on(cgroup)
        if not dry_run:
            for each in before:
                tag.detach(each, cgroup)
        lane = _lane_of(before[-1]) if before else None
        return _outcome(cgroup, "unmarked" if before else "unchanged", lane, dry_run)


def markings() -> list[Marking]:
    """Every marked cgroup that can be seen, read from the kernel.

    Raises PermissionMissing without CAP_NET_ADMIN, and without CAP_SYS_ADMIN when some cgroup has
    programs.
    """
    found = []
    for cgroup in cgroups.walk(cgroups.find_mount().point):
        with contextlib.suppress(ConfigError):  # gone since it was listed
            found += [(cgroup, each) for each in tag.tags_on(cgroup)]
    return [
        Marking(str(cgroup), _lane_of(each), each.priority, each.dscp, _count_processes(cgroup))
        for cgroup, each in found
    ]


def _hang(program: compiler.LoadedProgram, cgroup: Path, before: tuple[tag.Tag, ...]) -> None:
    """Put the program there, in the place of the newest of ours; older ones go as well."""
    tag.attach(program, cgroup, replace=before[-1] if before else None)
    for each in before[:-1]:
        tag.detach(each, cgroup)
    if [each.program_id for each in tag.tags_on(cgroup)] != [program.program_id]:
        raise ApplyError(
            f"{cgroup} did not keep the mark", hint="something else changes its BPF programs"
        )


def _marks(each: tag.Tag) -> tuple[int | None, int | None]:
    return each.priority, each.dscp


def _lane_of(each: tag.Tag) -> int | None:
    if each.priority is None or not 1 <= each.priority <= LANE_COUNT:
        return None
    return LANE_COUNT - each.priority


def _outcome(cgroup: Path, result: str, lane: int | None, dry_run: bool) -> Outcome:
    return Outcome(str(cgroup), result, lane, _count_processes(cgroup), dry_run)


def _count_processes(cgroup: Path) -> int:
    return sum(len(cgroups.processes(each)) for each in cgroups.walk(cgroup))


def _dscps_in_use() -> tuple[int, ...]:
    """The code points of the attached links of this network namespace."""
    from tlsched.linkstatus import status

    try:
        links = status()
    except PermissionMissing:
        return DEFAULT_DSCPS
    used = {
        tuple(band.dscp for band in link.bands if band.dscp is not None)
        for link in links
        if link.classifier is not None
    }
    if len(used) > 1:
        raise ConfigError(
            f"the attached links go by different DSCPs: {sorted(used)}",
            hint="say with --dscps which of them the connections should have",
        )
    return used.pop() if used else DEFAULT_DSCPS


@contextlib.contextmanager
def _lock(cgroup: Path) -> Iterator[None]:
    """One change of a cgroup at a time."""
    try:
        fd = os.open(cgroup / "cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ConfigError(f"the cgroup {cgroup} is gone", hint="name one that stays") from error
    try:
        cgroups.lock(fd, cgroup)
        yield
    finally:
        os.close(fd)
