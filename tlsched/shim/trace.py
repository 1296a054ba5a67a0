"""When each bucket was ready, sent and needed, iteration by iteration, for those who ask."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

KEPT = 100


@dataclass(slots=True)
class Iteration:
    """Times by bucket index, in time.perf_counter() seconds; ``start_s`` is the step() before.

    ``ready_s``: the gradient was complete; ``sent_s``: its average was there; ``needed_s``: a
    forward pass asked for it (in the iteration after the one that made it ready).
    """

    start_s: float
    ready_s: dict[int, float] = field(default_factory=dict)
    sent_s: dict[int, float] = field(default_factory=dict)
    needed_s: dict[int, float] = field(default_factory=dict)


class Trace:
    """The last KEPT iterations, those of learning included, the current one last."""

    def __init__(self) -> None:
        self.iterations = deque([Iteration(time.perf_counter())], maxlen=KEPT)

    def ready(self, bucket: int, future: torch.futures.Future[object]) -> None:
        """``bucket`` is handed to its lane; ``future`` completes when its average is there."""
        iteration = self.iterations[-1]
        iteration.ready_s[bucket] = time.perf_counter()

        def sent(_future: object) -> None:
            iteration.sent_s[bucket] = time.perf_counter()

        future.add_done_callback(sent)

    def needed(self, bucket: int) -> None:
        """A forward pass asks for ``bucket``."""
        self.iterations[-1].needed_s.setdefault(bucket, time.perf_counter())

    def end_iteration(self) -> None:
        """step() was called."""
        self.iterations.append(Iteration(time.perf_counter()))
