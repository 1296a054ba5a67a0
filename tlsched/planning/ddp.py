"""DistributedDataParallel's buckets as a plan, so that it can be simulated beside the policies.

DDP fills buckets in the order in which gradients came in its first iteration, closes one when it
has reached its size (torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size),
and averages them in that order over one process group.
"""

from __future__ import annotations

from tlsched.planning.plan import BucketPlan, Plan
from tlsched.planning.profile import Profile

CAP_BYTES = 25 * 2**20  # bucket_cap_mb's default
FIRST_BYTES = 2**20  # the first bucket is small, so that communication begins early


def ddp_plan(profile: Profile, cap_bytes: int = CAP_BYTES, first_bytes: int = FIRST_BYTES) -> Plan:
    """The plan that DDP makes of ``profile``'s buckets: with the policy ``sync``, it is DDP."""
    groups: list[list[int]] = []
    size = limit = 0
    for index in profile.launch_order:
        if size >= limit:
            limit = cap_bytes if groups else first_bytes
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += profile.buckets[index].bytes
    sent = [sorted(group) for group in groups]
    order = sorted(range(len(sent)), key=lambda number: sent[number][0])  # need order
    buckets = tuple(
        BucketPlan(
            tuple(name for index in sent[number] for name in profile.buckets[index].names),
            sum(profile.buckets[index].bytes for index in sent[number]),
            0,
        )
        for number in order
    )
    return Plan(buckets, tuple(order.index(number) for number in range(len(sent))))
