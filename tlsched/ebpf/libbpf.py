"""The few calls of libbpf that reading and filling maps, and hanging on a cgroup, takes.

libbpf.so.1 comes with iproute2 and with bcc. Loaded alone it costs some 8 MB and a few
milliseconds; importing bcc costs nine times as much. libbpf 1.x returns a negative errno
(libbpf's own documentation, "libbpf 1.0 migration guide").
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from typing import Any, TypeVar

from tlsched.errors import FeatureMissing, HostError, PermissionMissing, ProgramMissing

Key = TypeVar("Key", bound="ctypes._CData")

_NAME_LENGTH = 16  # BPF_OBJ_NAME_LEN of linux/bpf.h
_ALLOW_MULTI, _REPLACE = 2, 4  # BPF_F_ALLOW_MULTI, BPF_F_REPLACE of linux/bpf.h
_MAX_MAPS = 64  # BPF's own limit of maps in one program (MAX_USED_MAPS)
_MAX_PROGRAMS = 64  # at one hook (BPF_MPROG_MAX, BPF_CGROUP_MAX_PROGS)


class ProgramInfo(ctypes.Structure):
    """The beginning of ``struct bpf_prog_info`` (linux/bpf.h), as far as we read it."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
        ("tag", ctypes.c_uint8 * 8),
        ("jited_prog_len", ctypes.c_uint32),
        ("xlated_prog_len", ctypes.c_uint32),
        ("jited_prog_insns", ctypes.c_uint64),
        ("xlated_prog_insns", ctypes.c_uint64),
        ("load_time", ctypes.c_uint64),
        ("created_by_uid", ctypes.c_uint32),
        ("nr_map_ids", ctypes.c_uint32),
        ("map_ids", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_LENGTH),
    )


class MapInfo(ctypes.Structure):
    """The beginning of ``struct bpf_map_info`` (linux/bpf.h)."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
        ("key_size", ctypes.c_uint32),
        ("value_size", ctypes.c_uint32),
        ("max_entries", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
        ("name", ctypes.c_char * _NAME_LENGTH),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise FeatureMissing("libbpf.so.1 is missing", hint="apt install libbpf1") from error


def _fail(code: int, what: str, capability: str) -> HostError:
    reason = os.strerror(code)
    if code in (errno.EPERM, errno.EACCES):
        return PermissionMissing(
            f"no permission to {what}: {capability} is missing", hint="run it as root"
        )
    if code == errno.ENOENT:
        return ProgramMissing(f"cannot {what}: it does not exist", hint="attach the link again")
    return HostError(f"cannot {what}: {reason}", hint="see dmesg for the kernel's reason")


def _checked(result: int, what: str, capability: str = "CAP_SYS_ADMIN") -> int:
    if result < 0:
        raise _fail(-result, what, capability)
    return result


@contextlib.contextmanager
def program_by_id(program_id: int) -> Iterator[int]:
    """The descriptor of a loaded program, closed on leaving.

    Raises PermissionMissing without CAP_SYS_ADMIN (bpf(2), BPF_PROG_GET_FD_BY_ID), ProgramMissing
    when no such program is loaded.
    """
    call = _library().bpf_prog_get_fd_by_id
    fd = _checked(call(ctypes.c_uint32(program_id)), f"open BPF program {program_id}")
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def map_by_id(map_id: int) -> Iterator[int]:
    """The descriptor of a map, closed on leaving; errors as of :func:`program_by_id`."""
    call = _library().bpf_map_get_fd_by_id
    fd = _checked(call(ctypes.c_uint32(map_id)), f"open BPF map {map_id}")
    try:
        yield fd
    finally:
        os.close(fd)


def programs_at(target: int, hook: int) -> tuple[int, ...]:
    """Ids of the programs at a hook (``enum bpf_attach_type``) of an interface or a cgroup.

    ``target`` is the interface's number, or the cgroup's descriptor. None on a kernel that does
    not know the hook. Raises PermissionMissing without CAP_NET_ADMIN (bpf(2), BPF_PROG_QUERY).
    """
    ids = (ctypes.c_uint32 * _MAX_PROGRAMS)()
    count = ctypes.c_uint32(_MAX_PROGRAMS)
    call = _library().bpf_prog_query
    result = call(target, hook, ctypes.c_uint32(0), None, ids, ctypes.byref(count))
    if result == -errno.EINVAL:
        return ()
    _checked(result, "list the programs at a hook", "CAP_NET_ADMIN")
    return tuple(ids[: count.value])


def _fill_info(fd: int, info: ctypes.Structure, what: str) -> None:
    length = ctypes.c_uint32(ctypes.sizeof(info))
    call = _library().bpf_obj_get_info_by_fd
    _checked(call(fd, ctypes.byref(info), ctypes.byref(length)), what)


def program_info(program_fd: int) -> tuple[ProgramInfo, tuple[int, ...]]:
    """What the kernel knows about a program, and the ids of its maps."""
    info = ProgramInfo()
    ids = (ctypes.c_uint32 * _MAX_MAPS)()
    info.nr_map_ids = _MAX_MAPS
    info.map_ids = ctypes.addressof(ids)
    _fill_info(program_fd, info, "read what the kernel knows about the BPF program")
    return info, tuple(ids[: info.nr_map_ids])


def map_info(map_fd: int) -> MapInfo:
    """What the kernel knows about a map."""
    info = MapInfo()
    _fill_info(map_fd, info, "read what the kernel knows about the BPF map")
    return info


def lookup(map_fd: int, key: int | ctypes._CData, value: ctypes._CData) -> None:
    """Fill ``value`` from a map; a per-CPU map needs one element for each possible CPU.

    A key that is a Python number is a ``__u32``, as array maps have.
    """
    call = _library().bpf_map_lookup_elem
    _checked(call(map_fd, _pointer(key), ctypes.byref(value)), "read the BPF map")


def update(map_fd: int, key: int | ctypes._CData, value: ctypes._CData) -> None:
    """Write ``value`` into a map, under a new key or in place of what is there."""
    call = _library().bpf_map_update_elem
    result = call(map_fd, _pointer(key), ctypes.byref(value), ctypes.c_uint64(0))
    _checked(result, "fill the BPF map", "CAP_BPF")


def delete(map_fd: int, key: int | ctypes._CData) -> None:
    """Remove a key from a map, which must be there."""
    result = _library().bpf_map_delete_elem(map_fd, _pointer(key))
    _checked(result, "remove from the BPF map", "CAP_BPF")


def keys(map_fd: int, key_type: type[Key]) -> Iterator[Key]:
    """All keys of a map that nobody else changes meanwhile (bpf(2), BPF_MAP_GET_NEXT_KEY)."""
    call = _library().bpf_map_get_next_key
    before: Key | None = None
    while True:
        key = key_type()
        result = call(map_fd, None if before is None else ctypes.byref(before), ctypes.byref(key))
        if result == -errno.ENOENT:
            return
        _checked(result, "read the BPF map")
        yield key
        before = key


def _pointer(key: int | ctypes._CData) -> Any:
    return ctypes.byref(ctypes.c_uint32(key) if isinstance(key, int) else key)


def possible_cpus() -> int:
    """How many CPUs the kernel keeps a per-CPU value for (more than are online, often)."""
    return _checked(_library().libbpf_num_possible_cpus(), "count the possible CPUs")


class _AttachOptions(ctypes.Structure):
    """``struct bpf_prog_attach_opts`` of libbpf's bpf.h."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("replace_prog_fd", ctypes.c_int),
    )


def attach_to_cgroup(program_fd: int, cgroup_fd: int, hook: int, replace_fd: int = -1) -> int:
    """Hang a program on a cgroup, beside others or in the place of ``replace_fd``.

    Returns 0 or the errno: EPERM, where somebody's program stands there or above alone, is for
    the caller to explain. Others' programs keep running (BPF_F_ALLOW_MULTI, bpf(2)).
    """
    flags = _ALLOW_MULTI | (_REPLACE if replace_fd >= 0 else 0)
    options = _AttachOptions(ctypes.sizeof(_AttachOptions), flags, max(replace_fd, 0))
    call = _library().bpf_prog_attach_opts
    return -int(call(program_fd, cgroup_fd, hook, ctypes.byref(options)))


def detach_from_cgroup(program_fd: int, cgroup_fd: int, hook: int) -> None:
    """Take a program off a cgroup. Raises HostError when it is not there."""
    result = _library().bpf_prog_detach2(program_fd, cgroup_fd, hook)
    _checked(result, "take the BPF program off the cgroup", "CAP_NET_ADMIN")
