"""From complete buckets to their lanes, as the policy says: whole buckets.

:mod:`tlsched.shim.pieces` does the same for policies that cut buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tlsched.planning.policies import Policy
from tlsched.shim.bucket import Bucket
from tlsched.shim.lane import AnyLane
from tlsched.shim.trace import Trace


class Sending(Protocol):
    """What hands complete buckets over."""

    def open_round(self, policy: Policy, trace: Trace | None) -> None:
        """A backward begins that goes by ``policy``; all that the last one sent has arrived."""

    def complete(self, bucket: Bucket) -> None:
        """All gradients of ``bucket`` are there: start what the policy says."""

    def close_round(self) -> None:
        """Backward has ended."""

    def again(self, bucket: Bucket) -> None:
        """Average all of ``bucket`` once more, after everything else of this round."""

    def stop(self) -> None:
        """Hand over nothing more: the lanes are about to close."""


class WholeBuckets:
    """Each bucket is one all-reduce, started in the thread that completes it or one before it."""

    _policy: Policy
    _trace: Trace | None

    def __init__(self, buckets: Sequence[Bucket], lanes: Sequence[AnyLane]) -> None:
        self._buckets = buckets
        self._lanes = lanes

    def open_round(self, policy: Policy, trace: Trace | None) -> None:
        """See :class:`Sending`."""
        self._policy, self._trace = policy, trace
        policy.start_round()

    def complete(self, bucket: Bucket) -> None:
        """See :class:`Sending`."""
        if self._trace is not None:
            self._trace.ready(bucket.index)
        for send in self._policy.complete(bucket.index):
            self.again(self._buckets[send.bucket])

    def close_round(self) -> None:
        """See :class:`Sending`."""

    def again(self, bucket: Bucket) -> None:
        """See :class:`Sending`."""
        bucket.launch(self._lanes[bucket.lane].all_reduce)
        if self._trace is not None and bucket.work is not None:
            self._trace.launched(bucket.index, bucket.work.get_future())

    def stop(self) -> None:
        """See :class:`Sending`."""
