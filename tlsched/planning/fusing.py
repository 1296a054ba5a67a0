"""Plans over a profile: neighbours that share a bucket, and the profile of what comes out."""

from __future__ import annotations

from collections.abc import Sequence

from tlsched.errors import ConfigError
from tlsched.planning.plan import TINY_BYTES, BucketPlan, Plan
from tlsched.planning.profile import BucketProfile, Profile


def fused(profile: Profile, limit_bytes: float) -> Profile:
    """``profile`` with neighbours of one kind joined up to ``limit_bytes``.

    A tiny one joins the bucket before it whatever that one's size, unless it is the first: alone it
    would pay a whole ring's latency for a few packets.
    """
    joined: list[list[BucketProfile]] = []
    size = 0
    for bucket in profile.buckets:
        fits = size + bucket.bytes <= limit_bytes or bucket.bytes <= min(TINY_BYTES, limit_bytes)
        if joined and fits and joined[-1][0].kind == bucket.kind:
            joined[-1].append(bucket)
            size += bucket.bytes
        else:
            joined.append([bucket])
            size = bucket.bytes
    return Profile(tuple(map(_joined, joined)), profile.forward_s, profile.backward_s)


def profile_of_plan(profile: Profile, plan: Plan) -> Profile:
    """The profile of ``plan``'s buckets, each made of whole buckets of ``profile``.

    A bucket is ready when the last of its members is, and needed when the first one is. Raises
    ConfigError when the plan's buckets are not made of the profile's.
    """
    place = {name: number for number, b in enumerate(profile.buckets) for name in b.names}
    used: set[int] = set()
    buckets = []
    for bucket in plan.buckets:
        if any(name not in place for name in bucket.names):
            raise _foreign(next(name for name in bucket.names if name not in place))
        numbers = sorted({place[name] for name in bucket.names})
        members = [profile.buckets[number] for number in numbers]
        names = [name for member in members for name in member.names]
        if used & set(numbers) or set(names) != set(bucket.names):
            raise _foreign(bucket.names[0])
        used |= set(numbers)
        buckets.append(_joined(members))
    if len(used) < len(profile.buckets):
        raise _foreign(next(b.names for n, b in enumerate(profile.buckets) if n not in used)[0])
    return Profile(tuple(buckets), profile.forward_s, profile.backward_s)


def plan_on(profile: Profile, lanes: Sequence[int], launch_order: Sequence[int]) -> Plan:
    """The plan of ``profile``'s own buckets on ``lanes``, launched in ``launch_order``."""
    buckets = tuple(
        BucketPlan(bucket.names, bucket.bytes, lane)
        for bucket, lane in zip(profile.buckets, lanes, strict=True)
    )
    return Plan(buckets, tuple(launch_order))


def _joined(members: Sequence[BucketProfile]) -> BucketProfile:
    return BucketProfile(
        tuple(name for member in members for name in member.names),
        sum(member.bytes for member in members),
        max(member.ready_s for member in members),
        min(member.needed_s for member in members),
        members[0].kind,
    )


def _foreign(name: str) -> ConfigError:
    return ConfigError(
        f"the plan is not made of the profile's buckets (see {name})",
        hint="make the plan from this profile",
    )
