"""fifo: one lane in the order of the gradients; the next forward pass starts without a barrier."""

from __future__ import annotations

from tlsched.planning.plan import Plan, single_lane
from tlsched.planning.policies.base import Policy


def fifo(plan: Plan) -> Policy:
    """The policy ``fifo`` for ``plan``."""
    return Policy(single_lane(plan), barrier=False, marked=False)
