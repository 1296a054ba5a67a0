"""The tag program: loaded, hung on a cgroup, and recognised there.

The cgroup holds the program (``BPF_CGROUP_SOCK_OPS``, bpf(2)); nothing is pinned. Programs of
others on the same cgroup keep running. Reading which programs are there takes CAP_NET_ADMIN,
telling ours from others' CAP_SYS_ADMIN.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tlsched.bands import Band
from tlsched.ebpf import compiler, libbpf
from tlsched.errors import (
    ConfigError,
    FeatureMissing,
    ForeignProgram,
    HostError,
    ProgramMissing,
)

PROGRAM_NAME = "tlsched_tag"
TAG_MAP = "tag"
_SOURCE = Path(__file__).parent / "tag.bpf.c"
_HOOK = 3  # BPF_CGROUP_SOCK_OPS of linux/bpf.h


class TagValue(ctypes.Structure):
    """``struct tlsched_tag`` of tag.bpf.c: what the sockets get."""

    _fields_ = (("priority", ctypes.c_uint32), ("tos", ctypes.c_uint32))


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag program on a cgroup: its id, the kernel's digest of it, and the marks that it gives.

    The marks are None when another version of tlsched made it and they cannot be read.
    """

    program_id: int
    digest: str
    priority: int | None
    dscp: int | None


def load(lane: Band) -> compiler.LoadedProgram:
    """Compile and load the program that gives sockets the marks of ``lane``.

    Raises PermissionMissing without CAP_BPF and CAP_NET_ADMIN, FeatureMissing when bcc or the
    kernel cannot do it.
    """
    assert lane.priority is not None
    assert lane.tos is not None
    with compiler.compiled(_SOURCE, "tag program") as module:
        libbpf.update(module.map_fd(TAG_MAP), 0, TagValue(lane.priority, lane.tos))
        fd = module.load(PROGRAM_NAME, compiler.ProgramType.SOCK_OPS)
    return compiler.LoadedProgram(fd)


def tags_on(cgroup: Path) -> tuple[Tag, ...]:
    """Our programs on the cgroup itself, normally none or one.

    Raises PermissionMissing when it has programs and CAP_SYS_ADMIN, which tells whose they are,
    is missing.
    """
    with _opened(cgroup) as fd:
        ids = libbpf.programs_at(fd, _HOOK)
    found = []
    for program_id in ids:
        with contextlib.suppress(ProgramMissing):  # gone since it was listed
            found.append(_read(program_id))
    return tuple(tag for tag in found if tag is not None)


def attach(program: compiler.LoadedProgram, cgroup: Path, replace: Tag | None = None) -> None:
    """Hang the program on the cgroup, at once in the place of ``replace`` if that is given.

    Raises ForeignProgram when somebody's program insists on being alone there.
    """
    with _opened(cgroup) as fd, contextlib.ExitStack() as stack:
        old_fd = -1
        if replace is not None:
            old_fd = stack.enter_context(libbpf.program_by_id(replace.program_id))
        code = libbpf.attach_to_cgroup(program.fd, fd, _HOOK, old_fd)
        if code:
            raise _refusal(cgroup, code)


def _refusal(cgroup: Path, code: int) -> HostError:
    if code == errno.EPERM:
        return ForeignProgram(
            f"a BPF program of somebody else's on {cgroup} or above it lets no other beside it",
            hint="`bpftool cgroup tree` shows it (no flag multi); mark one that is not below it",
        )
    if code == errno.EINVAL:
        return FeatureMissing(
            "the kernel has no BPF programs on cgroups", hint="it needs CONFIG_CGROUP_BPF"
        )
    return HostError(
        f"cannot mark {cgroup}: {os.strerror(code)}",
        hint="somebody changed it at the same time: try again",
    )


def detach(tag: Tag, cgroup: Path) -> None:
    """Take one of our programs off the cgroup. Raises HostError when it is not there any more."""
    with _opened(cgroup) as fd, libbpf.program_by_id(tag.program_id) as program_fd:
        libbpf.detach_from_cgroup(program_fd, fd, _HOOK)


@contextlib.contextmanager
def _opened(cgroup: Path) -> Iterator[int]:
    """A descriptor of the cgroup; what fails because it was removed meanwhile is ConfigError."""
    try:
        fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _gone(cgroup) from error
    try:
        yield fd
    except HostError as error:
        if cgroup.exists():
            raise
        raise _gone(cgroup) from error
    finally:
        os.close(fd)


def _gone(cgroup: Path) -> ConfigError:
    return ConfigError(f"the cgroup {cgroup} is gone", hint="name one that stays")


def _read(program_id: int) -> Tag | None:
    """What the program does, or None when it is somebody else's."""
    with libbpf.program_by_id(program_id) as fd:
        info, map_ids = libbpf.program_info(fd)
    if info.name.decode() != PROGRAM_NAME:
        return None
    value = _read_value(map_ids)
    digest = bytes(info.tag).hex()
    if value is None:
        return Tag(program_id, digest, priority=None, dscp=None)
    return Tag(program_id, digest, value.priority, value.tos >> 2)


def _read_value(map_ids: tuple[int, ...]) -> TagValue | None:
    value = TagValue()
    for map_id in map_ids:
        with libbpf.map_by_id(map_id) as fd:
            shape = libbpf.map_info(fd)
            if (shape.name.decode(), shape.value_size) == (TAG_MAP, ctypes.sizeof(value)):
                libbpf.lookup(fd, 0, value)
                return value
    return None
