"""BPF_PROG_TEST_RUN: give the loaded classifier a packet of our making, see what it does."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass


class Context(ctypes.Structure):
    """``struct __sk_buff``, of which the kernel lets a test set a few fields."""

    _fields_ = (
        ("unused0", ctypes.c_uint32 * 8),
        ("priority", ctypes.c_uint32),
        ("ingress_ifindex", ctypes.c_uint32),
        ("unused1", ctypes.c_uint32 * 30),
        ("wire_len", ctypes.c_uint32),
        ("gso_segs", ctypes.c_uint32),
        ("unused2", ctypes.c_uint32 * 2),
        ("gso_size", ctypes.c_uint32),
        ("unused3", ctypes.c_uint32 * 3),
    )


class _Options(ctypes.Structure):
    """``struct bpf_test_run_opts`` of libbpf's bpf.h."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("data_in", ctypes.c_char_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_void_p),
        ("ctx_out", ctypes.c_void_p),
        ("ctx_size_in", ctypes.c_uint32),
        ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32),
        ("repeat", ctypes.c_int),
        ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("cpu", ctypes.c_uint32),
        ("batch_size", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Result:
    """What the classifier did to one packet; ``duration_ns`` is the mean over the repetitions."""

    verdict: int
    priority: int
    duration_ns: int


_libbpf = ctypes.CDLL("libbpf.so.1")


def run(
    program_fd: int,
    frame: bytes,
    *,
    priority: int = 0,
    ingress_ifindex: int = 0,
    gso_segs: int = 0,
    wire_len: int = 0,
    repeat: int = 1,
) -> Result:
    """Run the program on ``frame`` (from the Ethernet header on); OSError if the kernel refuses."""
    context = Context(
        priority=priority, ingress_ifindex=ingress_ifindex, gso_segs=gso_segs, wire_len=wire_len
    )
    after = Context()
    options = _Options(
        sz=ctypes.sizeof(_Options),
        data_in=frame,
        data_size_in=len(frame),
        ctx_in=ctypes.addressof(context),
        ctx_size_in=ctypes.sizeof(context),
        ctx_out=ctypes.addressof(after),
        ctx_size_out=ctypes.sizeof(after),
        repeat=repeat,
    )
    error = _libbpf.bpf_prog_test_run_opts(program_fd, ctypes.byref(options))
    if error:
        raise OSError(-error, os.strerror(-error))
    verdict = ctypes.c_int32(options.retval).value
    return Result(verdict, priority=after.priority, duration_ns=options.duration)
