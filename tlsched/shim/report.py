"""What run.report() tells: per bucket its lane, its bytes, the time waited, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlsched.shim.bucket import Bucket
from tlsched.shim.engine import Engine

LEARNING = "learning"
GUARDED = "needed by forward"
OUTSIDE = "read outside any forward"
BARRIER = "the policy waits at step()"


def rows(engine: Engine, use: Sequence[int]) -> list[dict[str, Any]]:
    """One row a bucket, in need order; ``use`` are the lanes that this training may use.

    ``waited_s`` is the time spent waiting for its averages in all. ``why`` says where its update is
    done; ``at_once`` counts, by reason, the updates that step() could not leave for later.
    """
    return [
        {
            "bucket": bucket.index,
            "lane": use[bucket.lane],
            "bytes": bucket.bytes,
            "parameters": list(bucket.names),
            "waited_s": bucket.waited_s,
            "why": _why(engine, bucket),
            "at_once": dict(bucket.at_once),
            "read_late": {
                n: engine.outside.late[n] for n in bucket.names if n in engine.outside.late
            },
        }
        for bucket in engine.gradients.buckets
    ]


def _why(engine: Engine, bucket: Bucket) -> str:
    if engine.learning:
        return LEARNING
    if engine.gradients.policy.barrier:
        return BARRIER
    if bucket in engine.eager:
        return OUTSIDE
    if engine.whole:
        return engine.whole
    if bucket.at_once:
        return max(bucket.at_once, key=lambda reason: bucket.at_once[reason])
    return GUARDED
