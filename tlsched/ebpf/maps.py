"""What the classifier counted and what it goes by, read from the kernel by program id.

Nothing is pinned and no file is kept: the filter on the link names its program, the program
its maps (bpf(2), BPF_OBJ_GET_INFO_BY_FD). bcc is not needed for it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tlsched.bands import DEFAULT_BAND, LANE_COUNT, Band
from tlsched.ebpf import abi, libbpf
from tlsched.errors import HostError

BAND_NAMES: tuple[str, ...] = (*(f"lane{lane}" for lane in range(LANE_COUNT)), DEFAULT_BAND)


@dataclass(frozen=True, slots=True)
class Counters:
    """A band's traffic since the program was loaded, as on the wire (GSO packets cut up)."""

    packets: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What leads a packet into a band; ``priority`` and ``dscp`` are None for the default band."""

    band: str
    priority: int | None
    dscp: int | None
    classid: int


def read_counters(program_id: int) -> dict[str, Counters]:
    """Counters of every band (lane0 to lane5, default), summed over the possible CPUs.

    Raises PermissionMissing without CAP_SYS_ADMIN, HostError when the program is gone or is
    not ours.
    """
    with open_map(program_id, abi.COUNTERS_MAP) as fd:
        return {name: _sum(fd, band) for band, name in enumerate(BAND_NAMES)}


def read_refused(program_id: int) -> Counters:
    """What bore a lane's DSCP without being trusted, and lost it; errors as of read_counters.

    It went to the default band, whose counters have it too.
    """
    with open_map(program_id, abi.COUNTERS_MAP) as fd:
        return _sum(fd, abi.REFUSED)


def _sum(counters_fd: int, key: int) -> Counters:
    per_cpu = (abi.CountersValue * libbpf.possible_cpus())()
    libbpf.lookup(counters_fd, key, per_cpu)
    packets = sum(value.packets for value in per_cpu)
    return Counters(packets, bytes=sum(value.bytes for value in per_cpu))


def read_marks(program_id: int) -> tuple[Mark, ...]:
    """The marks that the program goes by, lanes first; errors as of :func:`read_counters`."""
    marks = {}
    value = abi.MarkValue()
    with open_map(program_id, abi.MARKS_MAP) as fd:
        for dscp in range(abi.NO_DSCP):
            libbpf.lookup(fd, dscp, value)
            if value.band < LANE_COUNT:
                name = BAND_NAMES[value.band]
                marks[value.band] = Mark(name, value.priority, dscp, value.classid)
        libbpf.lookup(fd, abi.NO_DSCP, value)
    default = Mark(DEFAULT_BAND, priority=None, dscp=None, classid=value.classid)
    return (*(marks[band] for band in sorted(marks)), default)


def write_marks(marks_fd: int, bands: Sequence[Band]) -> None:
    """Fill the marks map behind ``marks_fd`` with ``bands``, lanes first, default last."""
    *lanes, default = bands
    unclaimed = abi.MarkValue(priority=0, band=LANE_COUNT, classid=default.classid)
    values = dict.fromkeys(range(abi.MARK_COUNT), unclaimed)
    for number, lane in enumerate(lanes):
        assert lane.dscp is not None
        values[lane.dscp] = abi.MarkValue(lane.priority, number, lane.classid)
    for dscp, value in values.items():
        libbpf.update(marks_fd, dscp, value)


@contextlib.contextmanager
def open_map(program_id: int, name: str) -> Iterator[int]:
    """The program's map called ``name``; HostError unless it has the shape that we know."""
    key, value, entries = abi.SHAPES[name]
    with libbpf.program_by_id(program_id) as program_fd:
        _, map_ids = libbpf.program_info(program_fd)
    for map_id in map_ids:
        with libbpf.map_by_id(map_id) as fd:
            info = libbpf.map_info(fd)
            if info.name.decode() != name:
                continue
            seen = (info.key_size, info.value_size, info.max_entries)
            if seen != (ctypes.sizeof(key), ctypes.sizeof(value), entries):
                break
            yield fd
            return
    raise HostError(
        f"BPF program {program_id} is not this version's classifier (map {name!r})",
        hint="detach the link and attach it again",
    )
