"""Ranks inside the hosts of a lab: one process a host, over its links.

Run as a module it is such a rank: it calls a function with JSON arguments, and prints its result as
the last line.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tlsched.lab import Lab

MASTER_PORT = 29517
ROOT = Path(__file__).parents[2]


class LabRanks:
    """One rank on each host of ``lab``, running ``body(rank, size, *args)``."""

    def __init__(self, lab: Lab, body: Callable[..., Any], *args: Any, ipv6: bool = False) -> None:
        first = lab.hosts[0]
        self.processes: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(lab.hosts):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(lab.hosts)),
                "MASTER_ADDR": first.ipv6 if ipv6 else first.ipv4,
                "MASTER_PORT": str(MASTER_PORT),
                "GLOO_SOCKET_IFNAME": host.iface,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, "-m", "tests.training.lab_ranks"]
            command += [body.__module__, body.__name__, json.dumps(args)]
            self.processes.append(
                lab.popen(
                    rank, command, env=environment, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip

    def wait_for_line(self, rank: int, text: str) -> None:
        """Until ``rank`` prints a line that begins with ``text``."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        while line := stdout.readline():
            if line.startswith(text):
                return
        raise AssertionError(f"rank {rank} ended: {self.processes[rank].communicate()[1]}")

    def results(self, timeout_s: float = 90.0) -> list[Any]:
        """What each rank's body returned, by way of JSON."""
        values = []
        for rank, process in enumerate(self.processes):
            out, err = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, f"rank {rank}: {err[-3000:]}"
            values.append(json.loads(out.strip().splitlines()[-1]))
        return values


def main() -> None:
    """Be a rank."""
    module, name, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    body = getattr(importlib.import_module(module), name)
    result = body(dist.get_rank(), dist.get_world_size(), *json.loads(arguments))
    dist.barrier()
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
