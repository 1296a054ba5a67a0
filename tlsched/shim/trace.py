"""When each bucket was ready, sent and needed, iteration by iteration."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

KEPT = 100


@dataclass(slots=True)
class Iteration:
    """Times by bucket index, in time.perf_counter() seconds; ``start_s`` is the step() before.

    ``needed_s``: a forward pass asked for it (in the iteration after the one that made it ready),
    after all forwards had waited ``waited_s`` for their gradients. ``ready_s``: its gradient was
    complete; ``launched_s``: it was handed to its lane; ``sent_s``: its average was there.
    ``began_s`` and ``ended_s`` are the last backward's, of ``backwards``.
    """

    start_s: float
    needed_s: dict[int, float] = field(default_factory=dict)
    waited_s: dict[int, float] = field(default_factory=dict)
    ready_s: dict[int, float] = field(default_factory=dict)
    launched_s: dict[int, float] = field(default_factory=dict)
    sent_s: dict[int, float] = field(default_factory=dict)
    began_s: float = 0.0
    ended_s: float = 0.0
    backwards: int = 0
    all_waited_s: float = 0.0


class Trace:
    """The last KEPT iterations, those of learning included, the current one last."""

    def __init__(self) -> None:
        self.iterations = deque([Iteration(time.perf_counter())], maxlen=KEPT)

    def needed(self, bucket: int) -> None:
        """A forward pass asks for ``bucket``."""
        iteration = self.iterations[-1]
        if bucket not in iteration.needed_s:
            iteration.needed_s[bucket] = time.perf_counter()
            iteration.waited_s[bucket] = iteration.all_waited_s

    def waited(self, seconds: float) -> None:
        """A forward pass has waited for a gradient."""
        self.iterations[-1].all_waited_s += seconds

    def backward_began(self) -> None:
        """The outermost backward begins."""
        iteration = self.iterations[-1]
        iteration.began_s = time.perf_counter()
        iteration.backwards += 1

    def ready(self, bucket: int) -> None:
        """The gradient of ``bucket`` is complete."""
        self.iterations[-1].ready_s[bucket] = time.perf_counter()

    def launched(self, bucket: int, future: torch.futures.Future[object]) -> None:
        """``bucket`` is handed to its lane; ``future`` completes when its average is there."""
        iteration = self.iterations[-1]
        iteration.launched_s[bucket] = time.perf_counter()

        def sent(_future: object) -> None:
            iteration.sent_s[bucket] = time.perf_counter()

        future.add_done_callback(sent)

    def backward_ended(self) -> None:
        """The outermost backward has returned."""
        self.iterations[-1].ended_s = time.perf_counter()

    def end_iteration(self) -> None:
        """step() was called."""
        self.iterations.append(Iteration(time.perf_counter()))
