"""What the classifier costs: nanoseconds a packet, by the kernel's own accounting.

Packets are given to the program one by one (BPF_PROG_TEST_RUN). Its repeat option would not do: the
program changes the packet's priority, so only the first repetition would see a lane's packet. The
kernel's run-time statistics (bpf(2), BPF_ENABLE_STATS) include reading the clock twice.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether

from bench.record import spread
from tests.ebpf import testrun
from tlsched.bands import all_bands
from tlsched.ebpf import program
from tlsched.errors import HostError

PACKETS = 100_000
BPF_STATS_RUN_TIME = 0  # enum bpf_stats_type, <linux/bpf.h>


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a kind of packet and band; kinds take turns, ``rounds`` times."""
    bands = all_bands()
    lane = bands[0]
    assert lane.tos is not None
    assert lane.priority is not None
    packets = {
        "ipv4": Ether() / IP(tos=lane.tos) / TCP(),
        "ipv6": Ether() / IPv6(tc=lane.tos) / TCP(),
        "ipv4, one VLAN tag": Ether() / Dot1Q(vlan=7) / IP(tos=lane.tos) / TCP(),
        "ipv4, two VLAN tags": Ether() / Dot1Q(vlan=7) / Dot1Q(vlan=8) / IP(tos=lane.tos) / TCP(),
    }
    cases = [(kind, band) for kind in packets for band in ("lane0", "default")]
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    with program.load(bands) as classifier, _statistics():
        for _ in range(rounds):
            for kind, band in cases:
                priority = lane.priority if band == "lane0" else 0
                expected = lane.classid if band == "lane0" else 0
                spent = _mean_ns(classifier.fd, bytes(packets[kind]), priority, expected)
                times[kind, band].append(spent)
    return [
        {"packet": kind, "band": band, "ns": spread(values)}
        for (kind, band), values in times.items()
    ]


def _mean_ns(program_fd: int, frame: bytes, priority: int, expected: int) -> float:
    """Mean nanoseconds of a run over PACKETS packets, each of which must get ``expected``."""
    spent_ns, runs = _run_time(program_fd)
    for _ in range(PACKETS):
        result = testrun.run(program_fd, frame, priority=priority)
        assert result.priority == expected, "the packet went to the wrong band"
    spent_after_ns, runs_after = _run_time(program_fd)
    return (spent_after_ns - spent_ns) / (runs_after - runs)


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
