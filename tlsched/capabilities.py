"""Which capabilities this process has in effect (capabilities(7))."""

from __future__ import annotations

from pathlib import Path

# Bits of CapEff in /proc/PID/status, <linux/capability.h>.
CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF = 12, 21, 38, 39


def held() -> frozenset[int]:
    """The numbers of the capabilities in effect, of the calling thread."""
    status = Path("/proc/thread-self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    bits = int(line.split()[1], 16)
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)
