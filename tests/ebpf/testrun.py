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


class Runner:
    """The same as :func:`run` for very many frames: its structures are made once.

    After a call ``frame`` is what the program left of the frame, ``verdict`` and ``priority`` are
    as in Result. Frames are at most ROOM bytes long.
    """

    ROOM = 256

    def __init__(self, program_fd: int) -> None:
        self._fd = program_fd
        self._before, self._after = Context(), Context()
        self._frame = ctypes.create_string_buffer(self.ROOM)
        self._options = _Options(
            sz=ctypes.sizeof(_Options),
            data_out=ctypes.addressof(self._frame),
            ctx_in=ctypes.addressof(self._before),
            ctx_size_in=ctypes.sizeof(Context),
            ctx_out=ctypes.addressof(self._after),
            repeat=1,
        )
        self._pointer = ctypes.byref(self._options)

    def __call__(self, frame: bytes, priority: int, ingress_ifindex: int) -> int:
        """Run the program; the errno with which the kernel refuses the frame, or 0."""
        self._before.priority = priority
        self._before.ingress_ifindex = ingress_ifindex
        options = self._options
        options.data_in = frame
        options.data_size_in = len(frame)
        options.data_size_out = self.ROOM
        options.ctx_size_out = ctypes.sizeof(Context)
        return -int(_libbpf.bpf_prog_test_run_opts(self._fd, self._pointer))

    @property
    def frame(self) -> bytes:
        return self._frame.raw[: self._options.data_size_out]

    @property
    def priority(self) -> int:
        return int(self._after.priority)

    @property
    def verdict(self) -> int:
        return ctypes.c_int32(self._options.retval).value


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
