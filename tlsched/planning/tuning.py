"""Tuning ByteScheduler's window while training runs, by Bayesian optimisation.

As in ByteScheduler (SOSP 2019, section 5): a Gaussian process over partition and credit, and the
point with the largest Expected Improvement is tried next (Jones, Schonlau and Welch, Journal of
Global Optimization 1998). Each point is the median of a few rounds. The package that does it,
bayesian-optimization, is optional and imported when a search begins.
"""

from __future__ import annotations

import math
import warnings
from importlib.util import find_spec
from statistics import median
from typing import Protocol

from tlsched.planning.policies.settings import Window

TRIALS = 14
ROUNDS_A_TRIAL = 3
SMALLEST_BYTES = 128 * 1024
LARGEST_BYTES = 64 * 1024 * 1024
# Credit is searched as a multiple of the partition: less than one piece is one piece anyway.
MOST_PIECES = 16


class Search(Protocol):
    """Chooses what to try next."""

    def next(self) -> Window:
        """What to try."""

    def tell(self, window: Window, seconds: float) -> None:
        """A round with ``window`` takes ``seconds``."""


class Tuning:
    """Tries windows, ``trials`` of them for some rounds each, and keeps the best.

    The first round of each is not counted: in it pieces are of another size than memory and
    network were warm for. With what is kept, nothing is measured any more.
    """

    def __init__(
        self, search: Search, *, trials: int = TRIALS, rounds_a_trial: int = ROUNDS_A_TRIAL
    ) -> None:
        self.window = search.next()
        self.tried: list[tuple[Window, float]] = []
        self._search = search
        self._trials = trials
        self._rounds = rounds_a_trial
        self._began_s: list[float] = []

    @property
    def finished(self) -> bool:
        """Whether the window stays as it is."""
        return len(self.tried) >= self._trials

    def round_began(self, now_s: float) -> Window:
        """A backward begins at ``now_s``: the window to use in this round."""
        if self.finished:
            return self.window
        self._began_s.append(now_s)
        if len(self._began_s) < self._rounds + 2:
            return self.window
        times = [b - a for a, b in zip(self._began_s[1:], self._began_s[2:], strict=False)]
        self._try_another(median(times))
        self._began_s = [now_s]
        return self.window

    def _try_another(self, seconds: float) -> None:
        self.tried.append((self.window, seconds))
        self._search.tell(self.window, seconds)
        if self.finished:
            self.window = min(self.tried, key=lambda tried: tried[1])[0]
        else:
            self.window = self._search.next()


class BayesianSearch:
    """Expected Improvement over the logarithms of partition and credit.

    It begins with the default window and a few that lie far apart. ``largest_bytes`` is the
    largest bucket's size, above which a partition means nothing.
    """

    def __init__(self, largest_bytes: int = LARGEST_BYTES, *, seed: int = 0) -> None:
        from bayes_opt import BayesianOptimization
        from bayes_opt.acquisition import ExpectedImprovement

        largest = max(2 * SMALLEST_BYTES, min(largest_bytes, LARGEST_BYTES))
        self._bounds = {
            "partition": (math.log2(SMALLEST_BYTES), math.log2(largest)),
            "pieces": (0.0, math.log2(MOST_PIECES)),
        }
        self._optimizer = BayesianOptimization(
            f=None,
            pbounds=self._bounds,
            acquisition_function=ExpectedImprovement(xi=0.01),
            random_state=seed,
            allow_duplicate_points=True,
            verbose=0,
        )
        # Iterations of one window differ by a percent or two, also where the median is taken.
        self._optimizer.set_gp_params(alpha=1e-2)
        self._first = [self._at(p, c) for p, c in ((0.2, 0.3), (0.8, 0.3), (0.2, 0.9), (0.6, 0.6))]
        self._first.append(Window())

    def next(self) -> Window:
        """See :class:`Search`."""
        if self._first:
            return self._first.pop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit that did not converge is a fit all the same
            point = self._optimizer.suggest()
        return _window(float(point["partition"]), float(point["pieces"]))

    def tell(self, window: Window, seconds: float) -> None:
        """See :class:`Search`."""
        point = {
            "partition": math.log2(window.partition_bytes),
            "pieces": math.log2(max(1.0, window.credit_bytes / window.partition_bytes)),
        }
        clipped = {
            name: min(max(value, self._bounds[name][0]), self._bounds[name][1])
            for name, value in point.items()
        }
        self._optimizer.register(params=clipped, target=-math.log(seconds))

    def _at(self, partition: float, pieces: float) -> Window:
        """The window at these shares of the way along the two ranges."""
        (low, high), (_, most) = self._bounds["partition"], self._bounds["pieces"]
        return _window(low + partition * (high - low), pieces * most)


def can_search() -> bool:
    """Whether the optional package is there."""
    return find_spec("bayes_opt") is not None


def _window(partition: float, pieces: float) -> Window:
    partition_bytes = round(2.0**partition)
    return Window(partition_bytes, round(partition_bytes * 2.0**pieces))
