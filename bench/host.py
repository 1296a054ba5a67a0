"""What the commands cost: seconds for attach, attach again, status and detach, as processes."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from bench.record import spread
from tlsched.lab import Lab

COMMANDS = {
    "attach": ["attach", "--rate", "1gbit"],
    "attach again": ["attach", "--rate", "1gbit"],
    "status": ["status"],
    "detach": ["detach"],
}


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a command, run ``rounds`` times on a link of an otherwise idle host."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with Lab(hosts=1, rate_bps=1_000_000_000) as lab:
        for _ in range(rounds):
            for name, arguments in COMMANDS.items():
                argv = [sys.executable, "-m", "tlsched", *arguments, "--iface", lab.hosts[0].iface]
                started_s = time.perf_counter()
                lab.run(0, argv, check=True, stdout=subprocess.DEVNULL)
                times[name].append(time.perf_counter() - started_s)
    return [{"command": name, "seconds": spread(values)} for name, values in times.items()]
