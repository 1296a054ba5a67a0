"""Lanes chosen anew from what a training run measures, on all ranks at the same step.

The first plan knows sizes only. After a few overlapped iterations all ranks tell each other what
they measured, take the slowest of each time, and choose the lanes by simulated time. Now and then
they measure again, and choose again when the network's speed has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from tlsched.planning.fabric import Fabric
from tlsched.planning.lanes import choose_lanes
from tlsched.planning.plan import Plan
from tlsched.planning.profile import Profile, slowest_profile
from tlsched.shim.agreement import Agreement
from tlsched.shim.bucket import Bucket
from tlsched.shim.profiling import measured_profile, seconds_a_byte
from tlsched.shim.trace import Trace

SKIPPED = 2  # overlapped iterations that still begin with what came before
MEASURED = 5
PERIOD = 200  # iterations between two measurements
MOVED = 0.2  # of the network's speed: a change that is worth another plan


class Replanner:
    """Tells after each step() whether there is a new plan.

    ``profile`` and ``fabric`` are what the last plan was made from, equal on all ranks. ``trace``
    records while a measurement is on, and is None otherwise unless it was given. ``start_s`` is
    what an all-reduce of nothing takes; ``choose`` whether lanes are to be chosen, and
    not only measured for the policy itself, and ``lane_count`` among how many.
    """

    def __init__(
        self,
        agreement: Agreement,
        trace: Trace | None,
        start_s: float,
        *,
        hold_back: bool,
        choose: bool,
        lane_count: int,
    ) -> None:
        self.profile: Profile | None = None
        self.fabric: Fabric | None = None
        self._agreement = agreement
        self._given = trace
        self._start_s = start_s
        self._hold_back = hold_back
        self._choose_lanes = choose
        self._lane_count = lane_count
        self._seconds_a_byte: float | None = None
        self._steps = 0
        self._begin = SKIPPED
        self.trace = trace

    def after_step(self, plan: Plan, buckets: Sequence[Bucket]) -> Plan | None:
        """A new plan for ``buckets``, or None. All ranks must ask at the same steps."""
        self._steps += 1
        if self._steps == self._begin:
            self.trace = self._given or Trace()
        if self.trace is None or self._steps < self._begin + MEASURED:
            return None
        measured, self.trace = self.trace, self._given
        self._begin = self._steps + PERIOD
        return self._choose(measured, plan, buckets)

    def _choose(self, trace: Trace, plan: Plan, buckets: Sequence[Bucket]) -> Plan | None:
        if self._agreement.size == 1:
            return None  # nothing is sent
        done = len(trace.iterations) - 1  # the current one has only begun
        recent = list(islice(trace.iterations, max(0, done - MEASURED), done))
        mine = measured_profile(recent, buckets), seconds_a_byte(recent, buckets)
        everyone = self._agreement.gather("profile", mine)
        profiles = [profile for profile, _ in everyone if profile is not None]
        speeds = [seconds for _, seconds in everyone if seconds]
        if len(profiles) < len(everyone) or len(speeds) < len(everyone):
            return None  # not one forward and one backward an iteration: the sizes must do
        before, now = self._seconds_a_byte, max(speeds)
        if before is not None and abs(now - before) <= MOVED * before:
            return None
        self.profile, self._seconds_a_byte = slowest_profile(profiles), now
        size = self._agreement.size
        hosts = Fabric(size, 1.0, step_s=self._start_s / (2 * (size - 1)))
        self.fabric = replace(hosts, rate_bps=8 * hosts.loads[0] / now)
        if not self._choose_lanes:
            return plan
        # The buckets stay: a ring over other buckets adds in another order, and the results would
        # no longer be those of `sync` to the bit.
        chosen = choose_lanes(
            self.profile, self.fabric, lane_count=self._lane_count, hold_back=self._hold_back
        )
        # Ranks may run on different processors: floating point may choose differently.
        lanes, order = self._agreement.from_rank_0("lanes", (chosen.lanes, chosen.launch_order))
        planned = zip(plan.buckets, lanes, strict=True)
        return Plan(tuple(replace(bucket, lane=lane) for bucket, lane in planned), order)
