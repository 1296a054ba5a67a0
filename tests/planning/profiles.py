"""Profiles and fabrics for tests: a network of layers, as backward and forward go over it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

from tlsched.planning.fabric import Fabric
from tlsched.planning.profile import BucketProfile, Profile

FABRIC = Fabric(hosts=4, rate_bps=1e9)


def layered(sizes: Sequence[int], forward_s: Sequence[float]) -> Profile:
    """Layers of ``sizes`` bytes; backward takes twice as long as forward, the other way round."""
    begins = [0.0, *accumulate(forward_s)]
    whole_s = begins.pop()
    buckets = tuple(
        BucketProfile((f"p{i}",), size, min(2 * (whole_s - begin), 2 * whole_s), begin)
        for i, (size, begin) in enumerate(zip(sizes, begins, strict=True))
    )
    return Profile(buckets, whole_s, 2 * whole_s)


def equal_layers(count: int, size: int, ratio: float, fabric: Fabric = FABRIC) -> Profile:
    """``count`` equal layers whose communication takes ``ratio`` times their computing."""
    compute_s = fabric.seconds(count * size) / ratio
    return layered([size] * count, [compute_s / 3 / count] * count)


@st.composite
def profiles(draw: st.DrawFn, most: int = 12) -> Profile:
    """Layers of any sizes and times, communication from a little to a lot of the computing."""
    count = draw(st.integers(1, most))
    sizes = draw(st.lists(st.integers(1, 4_000_000), min_size=count, max_size=count))
    times = draw(st.lists(st.floats(1e-4, 1.0), min_size=count, max_size=count))
    ratio = draw(st.floats(0.1, 4.0))
    scale = FABRIC.seconds(sum(sizes)) / ratio / (3 * sum(times))
    return layered(sizes, [scale * time_s for time_s in times])


fabrics = st.builds(
    Fabric,
    hosts=st.integers(2, 32),
    rate_bps=st.floats(1e8, 1e11),
    step_s=st.sampled_from([0.0, 1e-5, 150e-6]),
)
