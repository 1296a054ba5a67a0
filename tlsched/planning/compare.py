"""What each policy would make of a profile on a fabric: the figures of `tlsched plan`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tlsched.errors import ConfigError
from tlsched.planning.ddp import ddp_plan
from tlsched.planning.fabric import Fabric
from tlsched.planning.fusing import fused, plan_on, profile_of_plan
from tlsched.planning.lanes import choose_lanes
from tlsched.planning.plan import Plan, standard_fuse_bytes
from tlsched.planning.planner import fusings, plan_for
from tlsched.planning.policies import POLICIES, Policy, PolicySettings, Window, make_policy
from tlsched.planning.policies.oracle import oracle
from tlsched.planning.profile import Profile
from tlsched.planning.simulate import Simulated, simulate

# Beside what a training process may choose: torch's own, and the bound of all.
SIMULATED = ("ddp", *POLICIES, "oracle")
# What tuning `bytescheduler` would find, roughly: each piece half as large as the one before.
WINDOWS = tuple(
    Window(2**power * 2**20, pieces * 2**power * 2**20)
    for power in (4, 3, 2, 1, 0)
    for pieces in (1, 2)
)
MUCH = 3.0  # times the computing: not told in percent any more
LITTLE = 0.02  # a smaller gain is none to speak of


@dataclass(frozen=True, slots=True)
class Expected:
    """A policy's iteration: the profile of the buckets that it sends, and what comes of them."""

    policy: str
    profile: Profile
    simulated: Simulated

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration."""
        return self.simulated.settled_s


def expect(
    profile: Profile, fabric: Fabric, names: Iterable[str], *, plan: Plan | None = None
) -> dict[str, Expected]:
    """Each policy of ``names``, simulated on ``profile``'s modules. Raises ConfigError.

    ``plan`` is that of ``lanes`` and ``kernel`` (default: the planner's). The
    others get the best of several bucket sizes, and ``bytescheduler`` the best of WINDOWS.
    """
    wanted = list(names)
    for name in wanted:
        if name not in SIMULATED:
            raise ConfigError(
                f"there is no policy {name!r}", hint=f"use some of {', '.join(SIMULATED)}"
            )
    found = {}
    for name in wanted:
        if name in ("lanes", "kernel"):
            plan = plan or plan_for(profile, fabric)
        tries = [
            Expected(name, units, _alone(units, policy, fabric))
            for units, policy in _ways(name, profile, fabric, plan)
        ]
        found[name] = min(tries, key=lambda expected: expected.iteration_s)
    return found


def as_trained(
    profile: Profile, fabric: Fabric, name: str, *, window: Window | None = None
) -> Expected:
    """The policy ``name`` with the buckets that a training process makes without a profile.

    ``window`` is ``bytescheduler``'s. Raises ConfigError.
    """
    units = fused(profile, standard_fuse_bytes(profile.bytes))
    if name == "oracle":
        return Expected(name, profile, _alone(profile, oracle(_in_gradient_order(profile)), fabric))
    if name == "ddp":
        buckets = ddp_plan(profile)
        units, policy = profile_of_plan(profile, buckets), make_policy("sync", buckets)
    elif name in ("lanes", "kernel"):
        lanes = choose_lanes(units, fabric)
        policy = make_policy(name, plan_on(units, lanes.lanes, lanes.launch_order))
    else:
        settings = PolicySettings(window=window, profile=units, fabric=fabric)
        policy = make_policy(name, _in_gradient_order(units), settings)
    return Expected(name, units, _alone(units, policy, fabric))


def floor_s(profile: Profile, fabric: Fabric) -> float:
    """max(compute, communication): no schedule can make an iteration shorter."""
    return max(profile.compute_s, fabric.seconds(profile.bytes))


def verdict(expected: dict[str, Expected], profile: Profile, fabric: Fabric, rate: str) -> str:
    """One line for who wants to know whether it pays; needs ``ddp``, ``kernel`` and ``oracle``."""
    gain = expected["ddp"].iteration_s / expected["kernel"].iteration_s
    most = expected["ddp"].iteration_s / expected["oracle"].iteration_s
    share = fabric.seconds(profile.bytes) / profile.compute_s if profile.compute_s else 0.0
    much = f"{share:.0f} times the" if share >= MUCH else f"{share:.0%} of"
    part = f"communication is {much} computation"
    if gain < 1 + LITTLE:
        return f"nothing to gain at {rate}: {part}"
    return f"{gain:.2f}x at {rate} (no schedule gains more than {most:.2f}x): {part}"


def _ways(
    name: str, profile: Profile, fabric: Fabric, plan: Plan | None
) -> Iterator[tuple[Profile, Policy]]:
    """The buckets and the policy; several, where the policy has a choice."""
    if name == "ddp":
        buckets = ddp_plan(profile)
        yield profile_of_plan(profile, buckets), make_policy("sync", buckets)
    elif name == "oracle":
        yield profile, oracle(_in_gradient_order(profile))
    elif plan is not None and name in ("lanes", "kernel"):
        yield profile_of_plan(profile, plan), make_policy(name, plan)
    else:
        windows = WINDOWS if name == "bytescheduler" else (None,)
        for units, window in itertools.product(fusings(profile, fabric), windows):
            settings = PolicySettings(window=window, profile=units, fabric=fabric)
            yield units, make_policy(name, _in_gradient_order(units), settings)


def _alone(profile: Profile, policy: Policy, fabric: Fabric) -> Simulated:
    return simulate(profile, policy, fabric, iterations=1)


def _in_gradient_order(profile: Profile) -> Plan:
    return plan_on(profile, [0] * len(profile.buckets), profile.launch_order)
