"""sync: one lane, and step() waits for every bucket, as a synchronous data-parallel loop does."""

from __future__ import annotations

from tlsched.planning.plan import Plan, single_lane
from tlsched.planning.policies.base import Policy


def sync(plan: Plan) -> Policy:
    """The policy ``sync`` for ``plan``."""
    return Policy(single_lane(plan), barrier=True, marked=False)
