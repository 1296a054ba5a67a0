"""kernel: a lane for each band, and the kernel orders the packets of all lanes.

This is the transport-layer scheduling of Mercury (TPDS 2023, doi 10.1109/tpds.2023.3250462) with
sockets in place of its own transport: nothing is partitioned and ranks agree on nothing while they
run. ``lanes`` is the same without the marks, to tell what the marks buy.
"""

from __future__ import annotations

from tlsched.bands import LANE_COUNT
from tlsched.planning.plan import Plan
from tlsched.planning.policies.base import Policy


def kernel(plan: Plan, lane_count: int = LANE_COUNT) -> Policy:
    """The policy ``kernel`` for ``plan``."""
    return Policy(plan, barrier=False, marked=True, lane_count=lane_count, immediate=True)


def lanes(plan: Plan, lane_count: int = LANE_COUNT) -> Policy:
    """The policy ``lanes`` for ``plan``."""
    return Policy(plan, barrier=False, marked=False, lane_count=lane_count, immediate=True)
