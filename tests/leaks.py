"""What of ours exists on the machine: namespaces, labs, root qdiscs, BPF programs.

Compared before and after a test run. Several runs may share a machine, so only what is
certainly this run's is blamed on it.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from dataclasses import dataclass

from tests import netns
from tlsched.bands import MAJOR
from tlsched.lab import state

PROGRAM_PREFIX = "tlsched"
GRACE_S = 3.0  # the kernel frees a program some milliseconds after its last holder


@dataclass(frozen=True)
class Observed:
    """Names of namespaces, "dev handle" of our root qdiscs here, "id name" of programs."""

    namespaces: frozenset[str]
    qdiscs: frozenset[str]
    programs: frozenset[str]


def observe() -> Observed:
    """Read the machine's present state; needs root."""
    return Observed(frozenset(netns.namespaces()), _qdiscs(), _programs())


def left_behind(before: Observed) -> list[str]:
    """What this run made and did not remove, in words; waits a little for the kernel."""
    deadline_s = time.monotonic() + GRACE_S
    while (left := _compare(before, observe())) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def _compare(before: Observed, after: Observed) -> list[str]:
    new = after.namespaces - before.namespaces
    ours = sorted(name for name in new if netns.owner_pid(name) == os.getpid())
    left = [f"namespace {name}" for name in ours]
    left += [f"lab {record.topology.name}" for record in state.records() if _is_ours(record)]
    left += [f"qdisc {qdisc}" for qdisc in sorted(after.qdiscs - before.qdiscs)]
    if not _others_at_work(after.namespaces - frozenset(ours)):
        left += [f"BPF program {prog}" for prog in sorted(after.programs - before.programs)]
    return left


def _is_ours(record: state.Record) -> bool:
    return record.owner is not None and record.owner.pid == os.getpid()


def _others_at_work(names: frozenset[str]) -> bool:
    """Whether a program may be another run's: someone else's test or lab namespace is up."""
    return any(name.startswith((netns.PREFIX, "tlsched-")) for name in names)


def _qdiscs() -> frozenset[str]:
    shown = json.loads(netns.run("tc", "-json", "qdisc", "show").stdout or "[]")
    ours = [qdisc for qdisc in shown if qdisc.get("handle") == f"{MAJOR:x}:"]
    return frozenset(f"{qdisc['dev']} {qdisc['handle']}" for qdisc in ours)


def _programs() -> frozenset[str]:
    """Loaded BPF programs with our name, through libbpf (which libbcc depends on)."""
    try:
        libbpf = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError:
        return frozenset()  # then nothing of ours can load a program either
    found = set()
    current = ctypes.c_uint32(0)
    while libbpf.bpf_prog_get_next_id(current, ctypes.byref(current)) == 0:
        name = _program_name(libbpf, current.value)
        if name.startswith(PROGRAM_PREFIX):
            found.add(f"{current.value} {name}")
    return frozenset(found)


def _program_name(libbpf: ctypes.CDLL, program_id: int) -> str:
    """A program's name (struct bpf_prog_info in <linux/bpf.h>), "" when it is gone already."""
    fd = libbpf.bpf_prog_get_fd_by_id(program_id)
    if fd < 0:
        return ""
    try:
        info = ctypes.create_string_buffer(256)
        length = ctypes.c_uint32(len(info))
        if libbpf.bpf_obj_get_info_by_fd(fd, info, ctypes.byref(length)):
            return ""
        name_offset, name_length = 64, 16
        return info.raw[name_offset : name_offset + name_length].split(b"\0")[0].decode()
    finally:
        os.close(fd)
