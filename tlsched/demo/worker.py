"""A rank of the demonstration: reads one job a line from standard input, answers a line each.

Started by :mod:`tlsched.demo.cluster` inside a host of the lab, with torchrun's environment.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict

import torch
import torch.distributed as dist

from tlsched.demo.job import Job
from tlsched.demo.training import train


def main() -> None:
    """Train what is asked for until standard input ends."""
    torch.set_num_threads(1)
    # Lanes that the kernel does not order would be measured for nothing.
    warnings.filterwarnings("error", message="tlsched: the (kernel does not order|lanes are not)")
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for line in sys.stdin:
        result = train(Job(**json.loads(line)), rank, size)
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
