"""What the classifier costs: nanoseconds a packet, by the kernel's own accounting.

Packets are given to the program one by one (BPF_PROG_TEST_RUN). Its repeat option would not do: the
program changes the packet's priority, so only the first repetition would see a lane's packet. The
kernel's run-time statistics (bpf(2), BPF_ENABLE_STATS) include reading the clock twice; an empty
program, which takes its turn as well, shows what of the figure that is.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether

from bench.record import spread
from tests.ebpf import testrun
from tlsched.bands import DEFAULT_BAND, all_bands
from tlsched.ebpf import program, trustmaps
from tlsched.errors import HostError
from tlsched.trust import ANY_LOCAL, Trust, make_trust

PACKETS = 100_000
LANE = all_bands()[0]
BPF_PROG_TYPE_SCHED_CLS = 3  # <linux/bpf.h>
BPF_STATS_RUN_TIME = 0  # enum bpf_stats_type, <linux/bpf.h>


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a case; the cases take turns, ``rounds`` times."""
    cases = _cases()
    times: dict[Case, list[float]] = {case: [] for case in cases}
    empty: list[float] = []
    with program.load(all_bands()) as classifier, _empty_program() as nothing, _statistics():
        for _ in range(rounds):
            empty.append(_mean_ns(nothing, cases[0], check=False))
            for case in cases:
                trustmaps.change(classifier.program_id, trustmaps.resolve(case.trust))
                times[case].append(_mean_ns(classifier.fd, case))
    return [
        {
            "packet": case.kind,
            "trust": case.trust.describe(),
            "band": case.band,
            "ns": spread(values),
            "own_ns": spread([ns - base for ns, base in zip(values, empty, strict=True)]),
        }
        for case, values in times.items()
    ]


@dataclass(frozen=True)
class Case:
    """A packet, who is trusted meanwhile, and the band that it has to get into."""

    kind: str
    frame: bytes
    band: str
    trust: Trust = ANY_LOCAL
    forwarded: bool = False


def _cases() -> list[Case]:
    """Each kind of packet where every socket is trusted, and one kind under each other trust.

    A test run's socket is root's, in the cgroup of this process. "Refused" loses its DSCP.
    """
    four, source = IP(src="10.1.2.3", tos=LANE.tos) / TCP(), make_trust(sources=["10.0.0.0/8"])
    packets = {
        "ipv4": Ether() / four,
        "ipv6": Ether() / IPv6(tc=LANE.tos) / TCP(),
        "ipv4, one VLAN tag": Ether() / Dot1Q(vlan=7) / four,
        "ipv4, two VLAN tags": Ether() / Dot1Q(vlan=7) / Dot1Q(vlan=8) / four,
    }
    plain = bytes(packets["ipv4"])
    return [
        *(
            Case(kind, bytes(packet), band)
            for kind, packet in packets.items()
            for band in (LANE.name, DEFAULT_BAND)
        ),
        Case("ipv4", plain, LANE.name, make_trust(uids=[0])),
        Case("ipv4", plain, LANE.name, make_trust(["/"])),
        Case("ipv4, forwarded", plain, LANE.name, source, forwarded=True),
        Case("ipv4, refused", plain, DEFAULT_BAND, make_trust(uids=[1])),
        Case("ipv4, refused and forwarded", plain, DEFAULT_BAND, forwarded=True),
    ]


def _mean_ns(program_fd: int, case: Case, *, check: bool = True) -> float:
    """Mean nanoseconds of a run over PACKETS packets, each of which must get into its band."""
    into_lane = case.band == LANE.name
    priority = (LANE.priority or 0) if into_lane and not case.forwarded else 0
    expected = LANE.classid if into_lane else 0
    run = testrun.Runner(program_fd)
    spent_ns, runs = _run_time(program_fd)
    for _ in range(PACKETS):
        assert run(case.frame, priority, int(case.forwarded)) == 0
        assert not check or run.priority == expected, "the packet went to the wrong band"
    spent_after_ns, runs_after = _run_time(program_fd)
    return (spent_after_ns - spent_ns) / (runs_after - runs)


@contextmanager
def _empty_program() -> Iterator[int]:
    """The descriptor of a classifier that only returns TC_ACT_UNSPEC."""
    # struct bpf_insn: opcode, registers, offset, immediate. r0 = -1; exit.
    instructions = struct.pack("=BBhiBBhi", 0xB7, 0, 0, -1, 0x95, 0, 0, 0)
    fd = ctypes.CDLL("libbpf.so.1").bpf_prog_load(
        BPF_PROG_TYPE_SCHED_CLS, b"nothing", b"GPL", instructions, 2, None
    )
    if fd < 0:
        raise HostError("the kernel does not load an empty program", hint="run as root")
    try:
        yield fd
    finally:
        os.close(fd)


def _run_time(program_fd: int) -> tuple[int, int]:
    """Nanoseconds and number of all runs of the program so far (proc(5), fdinfo)."""
    text = Path(f"/proc/self/fdinfo/{program_fd}").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["run_time_ns"]), int(fields["run_cnt"])


@contextmanager
def _statistics() -> Iterator[None]:
    """Let the kernel account run times of BPF programs for as long as this lasts."""
    fd = ctypes.CDLL("libbpf.so.1").bpf_enable_stats(BPF_STATS_RUN_TIME)
    if fd < 0:
        raise HostError(
            "the kernel does not account the run time of BPF programs",
            hint="run as root; Linux 5.8 or later is needed",
        )
    try:
        yield
    finally:
        os.close(fd)
