"""An event-driven simulation of training: the policies themselves over a fluid network.

It drives the same policy objects as the training process. Computing follows the profile, the
network :mod:`tlsched.planning.fluid`. Several jobs may share the fabric.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tlsched.errors import ConfigError
from tlsched.planning.fabric import AT_ONCE, Fabric
from tlsched.planning.fluid import Fluid, Transfer
from tlsched.planning.policies.base import Policy, Send
from tlsched.planning.profile import Profile

DEFAULT_ITERATIONS = 3  # the first one begins with a backward on an idle network, as all others do


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """Seconds from the beginning of the iteration's backward; ``needed_s`` is in the next forward.

    ``sent_s`` is when the average was there.
    """

    ready_s: float
    sent_s: float
    needed_s: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """One job: seconds of each iteration, the last one's timeline, and its share of the links."""

    iteration_s: tuple[float, ...]
    timeline: tuple[BucketTimes, ...]
    link_use: float

    @property
    def settled_s(self) -> float:
        """Seconds of the last iteration."""
        return self.iteration_s[-1]


@dataclass(frozen=True, slots=True)
class Job:
    """A training: ``policy``'s plan has the buckets of ``profile``. It begins at ``begin_s``."""

    profile: Profile
    policy: Policy
    iterations: int = DEFAULT_ITERATIONS
    begin_s: float = 0.0


def simulate(
    profile: Profile, policy: Policy, fabric: Fabric, *, iterations: int = DEFAULT_ITERATIONS
) -> Simulated:
    """Train alone on ``fabric``."""
    return simulate_jobs([Job(profile, policy, iterations)], fabric)[0]


def simulate_jobs(jobs: Sequence[Job], fabric: Fabric) -> list[Simulated]:
    """Train all ``jobs`` on one fabric. Raises ConfigError when a plan is not for its profile."""
    return _Simulation(jobs, fabric).run()


class _Simulation:
    def __init__(self, jobs: Sequence[Job], fabric: Fabric) -> None:
        self.now_s = 0.0
        self.fabric = fabric
        bands = max((p.policy.lane_count for p in jobs if p.policy.marked), default=0)
        self.default_band = max(bands, 1)
        self.network: Fluid[_OnItsWay] = Fluid(
            [fabric.rate_bps / 8] * len(fabric.loads),
            bulk=fabric.bulk_flows,
            share=fabric.share,
            default_band=self.default_band,
        )
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._trainings = [_Training(job, self) for job in jobs]

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` at ``time_s``."""
        heapq.heappush(self._events, (time_s, next(self._serial), call))

    def run(self) -> list[Simulated]:
        for time_s, rate_bps in self.fabric.rate_changes:
            self.at(time_s, partial(self._set_rate, rate_bps))
        for training in self._trainings:
            self.at(training.job.begin_s, training.begin)
        while not all(training.done for training in self._trainings):
            end_s = self.now_s + self.network.next_end_s()
            event_s = self._events[0][0] if self._events else math.inf
            if min(end_s, event_s) == math.inf:
                raise AssertionError("the policy waits for ever")
            ended = self.network.advance(min(end_s, event_s) - self.now_s)
            self.now_s = min(end_s, event_s)
            for transfer in ended:
                transfer.what.training.ended(transfer.what)
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
        return [training.result() for training in self._trainings]

    def _set_rate(self, rate_bps: float) -> None:
        self.network.set_rates([rate_bps / 8] * len(self.fabric.loads))


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A transfer of ``training``, in its part number ``phase``."""

    training: _Training
    send: Send
    phase: int = 0


@dataclass(slots=True)
class _Lane:
    """A connection in one direction: what waits for it, and how many transfers it works on."""

    waiting: deque[_OnItsWay] = field(default_factory=deque)
    busy: int = 0


class _Training:
    """One job's state: which buckets are on their way, and how far each host's forward is."""

    def __init__(self, job: Job, simulation: _Simulation) -> None:
        if len(job.policy.plan.buckets) != len(job.profile.buckets):
            raise ConfigError(
                f"the plan has {len(job.policy.plan.buckets)} buckets and the profile "
                f"{len(job.profile.buckets)}",
                hint="use profile_of_plan() for a plan that fuses buckets",
            )
        self.job = job
        self.profile = job.profile
        self.policy = job.policy
        self.simulation = simulation
        factors = simulation.fabric.compute_factors or (1.0,)
        self._slower = np.asarray(factors, dtype=float)
        self._clock = np.full(len(factors), job.begin_s)
        self._phases = simulation.fabric.phases(immediate=job.policy.immediate)
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._ends: list[float] = []
        self._began: list[float] = []
        self._bytes_on_link = 0.0
        self.done = False

    def begin(self) -> None:
        """A backward begins, on each host at its own time."""
        buckets = self.profile.buckets
        self._began.append(float(self._clock.max()))
        self._left = [float(bucket.bytes) for bucket in buckets]
        self._arrived: list[float | None] = [None] * len(buckets)
        self._ready = [0.0] * len(buckets)
        self._needed = [0.0] * len(buckets)
        self._next = 0
        self.policy.start_round()
        for index in self.policy.plan.launch_order:
            ready_s = float((self._clock + buckets[index].ready_s * self._slower).max())
            self._ready[index] = ready_s
            self.simulation.at(ready_s, lambda i=index: self._send(self.policy.complete(i)))  # type: ignore[misc]  # bound now
        self._clock = self._clock + self.profile.backward_s * self._slower

    def ended(self, moved: _OnItsWay) -> None:
        """A part of a transfer has ended."""
        lane = self._lanes[moved.send.lane, moved.phase]
        lane.busy -= 1
        if moved.phase + 1 < len(self._phases):
            self._queue(replace(moved, phase=moved.phase + 1))
        else:
            self._sent(moved.send)
        self._serve(lane)
        self._forward()

    def _sent(self, send: Send) -> None:
        self._left[send.bucket] -= self._size(send)
        if self._left[send.bucket] <= 0.5:
            self._arrived[send.bucket] = self.simulation.now_s
        self._send(self.policy.sent(send))

    def result(self) -> Simulated:
        """What came out."""
        began_s = self._began[-1]
        timeline = tuple(
            BucketTimes(ready - began_s, (arrived or 0.0) - began_s, needed - began_s)
            for ready, arrived, needed in zip(self._ready, self._arrived, self._needed, strict=True)
        )
        times = tuple(end - begin for begin, end in zip(self._began, self._ends, strict=True))
        capacity = self.simulation.fabric.rate_bps / 8 * sum(times)
        return Simulated(times, timeline, self._bytes_on_link / capacity if capacity else 0.0)

    def _size(self, send: Send) -> float:
        stop = self.profile.buckets[send.bucket].bytes if send.stop is None else send.stop
        return stop - send.start

    def _send(self, sends: Sequence[Send]) -> None:
        if self.policy.dictated and sends:
            order_s = self.simulation.now_s + self.simulation.fabric.order_s
            self.simulation.at(order_s, lambda: self._hand_over(sends))
        else:
            self._hand_over(sends)

    def _hand_over(self, sends: Sequence[Send]) -> None:
        for send in sends:
            self._queue(_OnItsWay(self, send))

    def _queue(self, moved: _OnItsWay) -> None:
        lane = self._lanes.setdefault((moved.send.lane, moved.phase), _Lane())
        lane.waiting.append(moved)
        self._serve(lane)

    def _serve(self, lane: _Lane) -> None:
        fabric = self.simulation.fabric
        while lane.waiting and lane.busy < AT_ONCE:
            moved = lane.waiting.popleft()
            lane.busy += 1
            band = moved.send.lane if self.policy.marked else self.simulation.default_band
            size, loads = self._size(moved.send), self._phases[moved.phase]
            self._bytes_on_link += size * loads[0]
            begin_s = self.simulation.now_s + fabric.start_s / len(self._phases)
            transfer = Transfer(moved, max(size, 1.0), loads, band)
            self.simulation.at(begin_s, partial(self._begin, transfer))

    def _begin(self, transfer: Transfer[_OnItsWay]) -> None:
        if any(transfer.loads):
            self.simulation.network.add(transfer)
        else:  # one host alone: nothing goes over a link
            self.ended(transfer.what)

    def _forward(self) -> None:
        """Let forward go as far as its gradients have come."""
        buckets, now_s = self.profile.buckets, self.simulation.now_s
        if self.policy.barrier:
            if any(arrived is None for arrived in self._arrived):
                return
            self._clock = np.maximum(self._clock, now_s)
        before_s = buckets[self._next - 1].needed_s if self._next else 0.0
        while self._next < len(buckets):
            arrived = self._arrived[self._next]
            if arrived is None:
                return
            bucket = buckets[self._next]
            asked = self._clock + (bucket.needed_s - before_s) * self._slower
            self._needed[self._next] = float(asked.max())
            self._clock = np.maximum(asked, arrived)
            before_s = bucket.needed_s
            self._next += 1
        self._clock = self._clock + (self.profile.forward_s - before_s) * self._slower
        end_s = float(self._clock.max())
        self._ends.append(end_s)
        if len(self._ends) == self.job.iterations:
            self.done = True
        else:
            self.simulation.at(float(self._clock.min()), self.begin)
