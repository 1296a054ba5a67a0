"""Tuning: what is tried, what is measured, what is kept; and that the search finds good windows."""

from __future__ import annotations

import math
from statistics import median

import pytest

from tests.planning.test_piece_speed import EQUAL, HUGE, seconds_of
from tlsched.planning.policies import Window
from tlsched.planning.profile import Profile
from tlsched.planning.tuning import BayesianSearch, Tuning


class _InTurn:
    """Windows of 1, 2, 3, … thousand bytes."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def next(self) -> Window:
        return Window(1000 * (len(self.told) + 1), 10_000)

    def tell(self, window: Window, seconds: float) -> None:
        self.told.append((window.partition_bytes, seconds))


def _rounds(tuning: Tuning, seconds_with: dict[int, list[float]]) -> list[int]:
    """The partition of each round, where a round with partition p takes the next of its seconds."""
    now_s, used = 0.0, []
    while not tuning.finished:
        window = tuning.round_began(now_s)
        used.append(window.partition_bytes)
        if not tuning.finished:
            now_s += seconds_with[window.partition_bytes].pop(0)
    return used


def test_each_window_has_its_median_and_the_first_round_does_not_count() -> None:
    search = _InTurn()
    tuning = Tuning(search, trials=2, rounds_a_trial=3)
    times = {1000: [99.0, 3.0, 1.0, 2.0], 2000: [99.0, 1.0, 50.0, 1.0]}
    used = _rounds(tuning, times)
    assert used == [1000] * 4 + [2000] * 5
    assert search.told == [(1000, 2.0), (2000, 1.0)]
    assert tuning.window.partition_bytes == 2000


def test_what_is_kept_stays() -> None:
    tuning = Tuning(_InTurn(), trials=1, rounds_a_trial=1)
    _rounds(tuning, {1000: [1.0, 1.0]})
    assert {tuning.round_began(1000.0 * i) for i in range(20)} == {tuning.window}
    assert len(tuning.tried) == 1


@pytest.mark.parametrize("profile", [EQUAL, HUGE], ids=["equal", "huge"])
def test_the_search_comes_close_to_the_best_of_a_grid(profile: Profile) -> None:
    """14 points against 30 of a grid that spans the same range."""
    grid = [
        seconds_of(profile, "bytescheduler", Window(2**p, 2**p * pieces))
        for p in range(17, 27)
        for pieces in (1, 4, 16)
    ]
    search = BayesianSearch(max(bucket.bytes for bucket in profile.buckets))
    tuning = Tuning(search, rounds_a_trial=1)
    now_s = 0.0
    while not tuning.finished:
        now_s += seconds_of(profile, "bytescheduler", tuning.round_began(now_s))
    found = seconds_of(profile, "bytescheduler", tuning.window)
    assert found <= 1.03 * min(grid)
    assert found < 0.97 * median(grid)


def test_the_search_tries_many_windows_within_its_range() -> None:
    search = BayesianSearch(8 * 1024 * 1024, seed=1)
    tried = []
    for _ in range(8):
        tried.append(search.next())
        search.tell(tried[-1], 1.0 + abs(math.log2(tried[-1].partition_bytes) - 20))
    assert len(set(tried)) >= 7
    assert all(128 * 1024 <= window.partition_bytes <= 8 * 1024 * 1024 for window in tried)
    assert all(window.credit_bytes >= window.partition_bytes for window in tried)
