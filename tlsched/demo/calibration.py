"""What a fabric does with gloo's ring: the two figures that a simulation of it needs."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

LARGE_BYTES = 32 * 2**20
LARGE_ROUNDS = 5
SMALL_ROUNDS = 50


def calibrate(size: int) -> dict[str, float]:
    """``byte_s``: seconds for each byte of a large all-reduce; ``step_s``: of a ring's step.

    Over the default group of ``size`` ranks, on links that carry nothing else. Medians.
    """
    small_s = _all_reduce_s(1, SMALL_ROUNDS)
    large_s = _all_reduce_s(LARGE_BYTES // 4, LARGE_ROUNDS)
    return {
        "byte_s": (large_s - small_s) / LARGE_BYTES,
        "step_s": small_s / max(1, 2 * (size - 1)),
    }


def _all_reduce_s(elements: int, rounds: int) -> float:
    flat = torch.zeros(elements)
    times = []
    for number in range(rounds + 1):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(flat)
        if number:  # the first one warms connections and memory
            times.append(time.perf_counter() - began_s)
    return median(times)
