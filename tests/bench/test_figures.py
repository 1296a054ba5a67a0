"""What benchmarks make of what was measured, without measuring."""

from __future__ import annotations

import pytest

from bench import rate_change, real, trainings, two_jobs
from tlsched.demo.job import Job, Result
from tlsched.errors import TrainingError


def test_only_iterations_in_which_both_jobs_were_timed_count() -> None:
    first = Result([1.0, 1.0, 1.0, 1.0], 0.0, began_s=10.0)  # until 14
    second = Result([2.0, 1.0], 0.0, began_s=10.5)  # until 13.5
    assert two_jobs.overlapping([first, second]) == [[1.0, 1.0], [2.0, 1.0]]


def test_an_iteration_across_a_change_belongs_to_no_phase() -> None:
    result = Result([1.0, 1.0, 1.0, 1.0], 0.0, began_s=10.0)
    assert rate_change.within(result, rate_change.Phase(1, 10.0, 11.5)) == [1.0]
    assert rate_change.within(result, rate_change.Phase(1, 11.5, float("inf"))) == [1.0, 1.0]


def test_the_loss_is_reached_by_the_mean_of_all_ranks() -> None:
    losses = [[4.0, 3.0, 2.0, 2.0, 2.0, 0.0, 0.0], [4.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0]]
    results = [Result([1.0] * 7, 0.0, losses=own, startup_s=0.5) for own in losses]
    assert real.reached(results, 1.4) == (6, 6.5)
    with pytest.raises(TrainingError, match=r"not 0\.1"):
        real.reached(results, 0.1)


def test_policies_that_learn_differently_are_found() -> None:
    def done(policy: str, learned: float) -> tuple[Job, list[Result]]:
        job = Job("replay", policy, 9, warmup=2)
        return job, [Result([1.0], 1 - 10 * learned)] * 2

    trainings.require_alike([done("ddp", 0.016), done("kernel", 0.016001)])
    with pytest.raises(TrainingError, match="policy kernel learns"):
        trainings.require_alike([done("ddp", 0.016), done("kernel", 0.0161)])
