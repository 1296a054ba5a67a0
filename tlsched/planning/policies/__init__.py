"""The policies: who decides the order in which buckets are sent.

A policy is a pure state machine: it is told that a bucket's gradient is complete and answers
which buckets to hand to which lane now. It knows no torch, no clock and no socket, so that a
simulator and a training process can run the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tlsched.errors import ConfigError
from tlsched.planning.plan import Plan
from tlsched.planning.policies.base import Policy, Send, in_one_order
from tlsched.planning.policies.bytescheduler import bytescheduler
from tlsched.planning.policies.fifo import fifo
from tlsched.planning.policies.kernel import kernel, lanes
from tlsched.planning.policies.prophet import prophet
from tlsched.planning.policies.settings import PolicySettings, Window
from tlsched.planning.policies.sync import sync

POLICIES: dict[str, Callable[[Plan, PolicySettings], Policy]] = {
    "sync": lambda plan, _: sync(plan),
    "fifo": lambda plan, _: fifo(plan),
    "bytescheduler": bytescheduler,
    "prophet": prophet,
    "lanes": lambda plan, settings: lanes(plan, settings.lane_count),
    "kernel": lambda plan, settings: kernel(plan, settings.lane_count),
}

__all__ = [
    "POLICIES",
    "Policy",
    "PolicySettings",
    "Send",
    "Window",
    "in_one_order",
    "make_policy",
    "traits_of",
]


def make_policy(name: str, plan: Plan, settings: PolicySettings | None = None) -> Policy:
    """The policy called ``name`` for ``plan``; ConfigError lists the names when there is none.

    ``settings`` are for the policies that go by more than the plan (default: see
    :class:`PolicySettings`).
    """
    try:
        factory = POLICIES[name]
    except KeyError:
        raise ConfigError(
            f"there is no policy {name!r}", hint=f"use one of {', '.join(POLICIES)}"
        ) from None
    return factory(plan, settings or PolicySettings())


def traits_of(name: str, settings: PolicySettings) -> Policy:
    """The policy called ``name`` without buckets: how many lanes it has, marked or not, and so on.

    A profile in ``settings`` belongs to a plan with buckets, so it is not looked at.
    """
    return make_policy(name, Plan((), ()), replace(settings, profile=None, fabric=None))
