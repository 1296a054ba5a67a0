"""The plan: which parameters share a bucket, which lane each bucket takes, and in which order.

Pure functions over names and sizes: every rank that is given the same facts makes the same plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tlsched.bands import LANE_COUNT

# Neighbours in need order are fused up to this size. It is a trade: a smaller bucket can be sent
# and waited for on its own, but each bucket costs every ring step a message, and a ring's latency.
FUSE_BYTES = 512 * 1024
# In a larger model up to this part of all its bytes: finer buckets gain next to nothing in
# simulated time (under a percent on the replayed shapes), and each costs its start-up.
FUSE_PARTS = 48

# A group below this size (a norm layer, a bias) joins the bucket before it whatever that one's
# size: alone it would pay a whole ring's latency for a few packets.
TINY_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """What planning knows of a trainable parameter.

    ``reader`` names the module whose forward first reads it ("" for the root module), or is None
    when none was seen. ``kind`` is dtype and device, which a bucket's members must share.
    """

    name: str
    bytes: int
    kind: str
    reader: str | None


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The parameters of one bucket, by name and in need order, and its lane (0 most urgent)."""

    names: tuple[str, ...]
    bytes: int
    lane: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Buckets in need order; ``launch_order`` holds their indices in the order of their gradients.

    ``launch_order`` is the fixed order in which every rank hands buckets to their lane.
    """

    buckets: tuple[BucketPlan, ...]
    launch_order: tuple[int, ...]

    def digest(self) -> str:
        """A hash that is equal on two ranks exactly if their plans are."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def make_plan(
    parameters: Sequence[ParameterInfo],
    ready_rank: Mapping[str, int],
    *,
    fuse_bytes: int | None = None,
    lane_count: int = LANE_COUNT,
) -> Plan:
    """Plan ``parameters``, given in need order, fused up to ``fuse_bytes``.

    By default up to :func:`standard_fuse_bytes` of them all. ``ready_rank`` tells for each name the
    position at which backward produced its gradient; a bucket is launched when its last gradient
    is there.
    """
    if fuse_bytes is None:
        fuse_bytes = standard_fuse_bytes(sum(info.bytes for info in parameters))
    groups = [list(members) for members in _fuse(_by_reader(parameters), fuse_bytes)]
    sizes = [sum(p.bytes for p in members) for members in groups]
    lanes = cut_by_bytes(sizes, lane_count)
    buckets = tuple(
        BucketPlan(tuple(p.name for p in members), size, lane)
        for members, size, lane in zip(groups, sizes, lanes, strict=True)
    )
    complete_at = [max(ready_rank[name] for name in bucket.names) for bucket in buckets]
    order = sorted(range(len(buckets)), key=lambda index: complete_at[index])
    return Plan(buckets, tuple(order))


def standard_fuse_bytes(total_bytes: int) -> int:
    """Up to which size neighbours are fused where nothing is known but the model's ``total_bytes``.

    It depends on sizes only, so that a model has the same buckets in every run and under every
    policy: a ring over other buckets adds in another order, which rounds differently.
    """
    return max(FUSE_BYTES, total_bytes // FUSE_PARTS)


def single_lane(plan: Plan, lane: int = 0) -> Plan:
    """The same buckets in the same order, all on one lane."""
    return replace(plan, buckets=tuple(replace(bucket, lane=lane) for bucket in plan.buckets))


def cut_by_bytes(sizes: Sequence[int], lane_count: int = LANE_COUNT) -> list[int]:
    """Lane of each bucket, for buckets of ``sizes`` bytes in need order.

    The bytes are cut into ``lane_count`` equal parts and a bucket takes the part in which its
    middle lies, so that lanes rise with need order and one huge bucket keeps a lane for itself.
    """
    total = sum(sizes)
    lanes: list[int] = []
    before = 0
    for size in sizes:
        middle = before + size / 2
        lanes.append(min(lane_count - 1, int(middle * lane_count / total)) if total else 0)
        before += size
    return lanes


def _by_reader(parameters: Iterable[ParameterInfo]) -> list[list[ParameterInfo]]:
    """Split where the reader or the kind changes."""
    groups: list[list[ParameterInfo]] = []
    for info in parameters:
        last = groups[-1][-1] if groups else None
        if last is not None and (last.reader, last.kind) == (info.reader, info.kind):
            groups[-1].append(info)
        else:
            groups.append([info])
    return groups


def _fuse(groups: list[list[ParameterInfo]], fuse_bytes: int) -> list[list[ParameterInfo]]:
    """Join small neighbours of one kind."""
    fused: list[list[ParameterInfo]] = []
    size = 0
    for group in groups:
        added = sum(info.bytes for info in group)
        fits = size + added <= fuse_bytes or added <= TINY_BYTES
        if fused and fits and fused[-1][0].kind == group[0].kind:
            fused[-1] += group
            size += added
        else:
            fused.append(group)
            size = added
    return fused
