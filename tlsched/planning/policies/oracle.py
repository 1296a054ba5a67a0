"""oracle: a lane and a band for each bucket. A bound to hold policies against, in simulation only.

On one link, sending the most urgent bucket of those that are ready, and interrupting it for a more
urgent one, makes the greatest lateness as small as it can be (Horn, Naval Research Logistics
Quarterly 21, 1974: earliest due date with preemption). So no policy ends an iteration sooner.
"""

from __future__ import annotations

from dataclasses import replace

from tlsched.planning.plan import Plan
from tlsched.planning.policies.base import Policy


def oracle(plan: Plan) -> Policy:
    """``plan``'s buckets with a lane each. No training process has so many bands."""
    buckets = tuple(replace(bucket, lane=lane) for lane, bucket in enumerate(plan.buckets))
    alone = replace(plan, buckets=buckets)
    count = max(1, len(buckets))
    return Policy(alone, barrier=False, marked=True, lane_count=count, immediate=True)
