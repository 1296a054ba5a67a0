"""From a trace to a profile: what computing alone takes, and what the network carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tlsched.planning.profile import BucketProfile, Profile, median_profile
from tlsched.shim.bucket import Bucket
from tlsched.shim.trace import Iteration


def measured_profile(iterations: Iterable[Iteration], buckets: Sequence[Bucket]) -> Profile | None:
    """The median of those ``iterations`` that were one forward and one backward over all buckets.

    None when there is none. What forward waited for gradients is taken out; what lies between
    step() and forward, such as loading a batch, counts as forward.
    """
    profiles = [
        profile
        for iteration in iterations
        if (profile := _profile_of(iteration, buckets)) is not None
    ]
    return median_profile(profiles) if profiles else None


def seconds_a_byte(iterations: Iterable[Iteration], buckets: Sequence[Bucket]) -> float | None:
    """How long the network took for each byte of gradients while it had any, or None.

    The median over ``iterations`` of: the time in which some bucket was launched and not yet
    averaged, over all buckets' bytes.
    """
    total = sum(bucket.bytes for bucket in buckets)
    busy = sorted(
        _covered(zip(map(one.launched_s.get, one.sent_s), one.sent_s.values(), strict=True))
        for one in iterations
        if len(one.sent_s) == len(buckets)
    )
    return busy[len(busy) // 2] / total if busy and total else None


def _profile_of(iteration: Iteration, buckets: Sequence[Bucket]) -> Profile | None:
    everyone = range(len(buckets))
    if iteration.backwards != 1 or not all(
        index in iteration.ready_s and index in iteration.needed_s for index in everyone
    ):
        return None
    needed = [
        iteration.needed_s[index] - iteration.start_s - iteration.waited_s[index]
        for index in everyone
    ]
    forward_s = iteration.began_s - iteration.start_s - iteration.all_waited_s
    backward_s = iteration.ended_s - iteration.began_s
    measured, before_s = [], 0.0
    for index, bucket in enumerate(buckets):
        # Need order was learned; a bucket that is now asked for earlier is needed no later.
        before_s = min(max(before_s, needed[index]), forward_s)
        ready_s = min(max(0.0, iteration.ready_s[index] - iteration.began_s), backward_s)
        measured.append(BucketProfile(bucket.names, bucket.bytes, ready_s, before_s, bucket.kind))
    return Profile(tuple(measured), forward_s, backward_s)


def _covered(intervals: Iterable[tuple[float | None, float]]) -> float:
    """Length of the union of ``intervals``."""
    covered, end_s = 0.0, float("-inf")
    for start_s, stop_s in sorted((a, b) for a, b in intervals if a is not None):
        covered += max(0.0, stop_s - max(start_s, end_s))
        end_s = max(end_s, stop_s)
    return covered
