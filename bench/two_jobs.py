"""Two trainings on the same links, begun together, beside each of them alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import trainings
from bench.record import LabRecord, tail
from bench.step import Setting
from tlsched.demo.cluster import MASTER_PORT, Cluster
from tlsched.demo.job import WARMUP, Job, Result
from tlsched.demo.links import Links
from tlsched.lab import Lab

HOSTS = 4
RATE_BPS = 1_000_000_000
COMPUTE_S = 0.4
ITERATIONS = 25
# The two jobs' communication over computation. Together they fill the link, and no more.
SCENARIOS = {"equal": (0.5, 0.5), "one twice the other": (1 / 3, 2 / 3)}


@dataclass(frozen=True, slots=True)
class Variant:
    """How two jobs share links: a policy, and the lanes that each of them uses (None: all)."""

    name: str
    policy: str
    lanes: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)


VARIANTS = (
    Variant("DDP on FIFO links", "ddp"),
    Variant("tlsched, both on all lanes", "kernel"),
    Variant("tlsched, job a first", "kernel", ((0, 1, 2), (3, 4, 5))),
)


def steps(scenarios: Sequence[str], rounds: int) -> int:
    """How many trainings, or pairs of them, :func:`measure` makes."""
    return len(scenarios) * rounds * (len(VARIANTS) + 4)


def measure(
    scenarios: Sequence[str],
    rounds: int,
    step: Callable[[str], None],
    *,
    iterations: int = ITERATIONS,
    compute_s: float = COMPUTE_S,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a scenario, variant and job, with what the job takes alone under that policy."""
    rows: list[dict[str, Any]] = []
    with Lab(hosts=HOSTS, rate_bps=RATE_BPS) as lab:
        links, described = Links(lab), LabRecord(lab)
        with (
            Cluster(lab, links=links) as first,
            Cluster(lab, links=links, master_port=MASTER_PORT + 1) as second,
        ):
            for scenario in scenarios:
                pair = _Pair(scenario, (first, second), iterations, compute_s)
                for turn in range(rounds):
                    pair.measure(lambda what, turn=turn: step(f"{what}, round {turn + 1}"))  # type: ignore[misc]  # bound now
                rows += pair.rows()
        lab_record = described.close()
    return rows, lab_record


class _Pair:
    """The two jobs of a scenario, and what was measured of them."""

    def __init__(
        self,
        scenario: str,
        clusters: tuple[Cluster, Cluster],
        iterations: int,
        compute_s: float,
    ) -> None:
        self._scenario = scenario
        self._clusters = clusters
        self._ratios = SCENARIOS[scenario]
        self._settings = [
            Setting("vgg16", ratio, HOSTS, RATE_BPS, communication_s=ratio * compute_s)
            for ratio in self._ratios
        ]
        self._iterations = iterations
        self._alone: dict[tuple[str, int], list[float]] = {}
        self._shared: dict[tuple[str, int], list[float]] = {}

    def measure(self, step: Callable[[str], None]) -> None:
        """Each job alone under each policy, then both together in each variant."""
        for policy, number in itertools.product(("ddp", "kernel"), (0, 1)):
            step(f"{self._scenario}: job {'ab'[number]} alone, {policy}")
            job = self._job(number, policy)
            results = self._clusters[number].train(job)
            trainings.require_alike([(job, results)])
            self._alone.setdefault((policy, number), []).extend(results[0].iteration_s)
        for variant in VARIANTS:
            step(f"{self._scenario}: {variant.name}")
            for number, times in enumerate(self._together(variant)):
                self._shared.setdefault((variant.name, number), []).extend(times)

    def rows(self) -> Iterator[dict[str, Any]]:
        """What came out."""
        for variant, number in itertools.product(VARIANTS, (0, 1)):
            yield {
                "bench": "two-jobs",
                "scenario": self._scenario,
                "variant": variant.name,
                "policy": variant.policy,
                "job": "ab"[number],
                "ratio": self._ratios[number],
                "iteration_s": tail(self._shared[variant.name, number]),
                "alone": tail(self._alone[variant.policy, number]),
            }

    def _job(self, number: int, policy: str) -> Job:
        # The same warm-up for both: they begin together.
        job = trainings.job(self._settings[number], policy, self._iterations)
        return replace(job, warmup=WARMUP)

    def _together(self, variant: Variant) -> list[list[float]]:
        """Both jobs' iterations from when both were timed until the first of them had ended."""
        jobs = [
            replace(self._job(number, variant.policy), lanes=variant.lanes[number])
            for number in (0, 1)
        ]
        self._clusters[0].links.order(ordered=variant.policy == "kernel")
        for cluster, job in zip(self._clusters, jobs, strict=True):
            cluster.begin(job)
        pairs = zip(self._clusters, jobs, strict=True)
        results = [cluster.results(job) for cluster, job in pairs]
        for job, of_job in zip(jobs, results, strict=True):
            trainings.require_alike([(job, of_job)])
        return overlapping([of_job[0] for of_job in results])


def overlapping(results: Sequence[Result]) -> list[list[float]]:
    """Of each result the iterations that lie in the time in which all of them were timed."""
    timed = [list(spans(result)) for result in results]
    begin_s = max(own[0][0] for own in timed)
    end_s = min(own[-1][1] for own in timed)
    return [[b - a for a, b in own if begin_s <= a and b <= end_s] for own in timed]


def spans(result: Result) -> Iterator[tuple[float, float]]:
    """Begin and end of each timed iteration, by CLOCK_MONOTONIC."""
    begin_s = result.began_s
    for seconds in result.iteration_s:
        yield begin_s, begin_s + seconds
        begin_s += seconds
