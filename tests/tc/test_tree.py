"""The desired tree, as data."""

from __future__ import annotations

import pytest

from tlsched.bands import all_bands
from tlsched.config import LinkSettings, share_bps
from tlsched.tc.options import Bfifo
from tlsched.tc.tree import GSO_BYTES, TICK_NS, Tree, desired_tree

RATES_BPS = [10**7, 10**8, 10**9, 10**10, 10**11, 4 * 10**11, 10**12]


def tree_of(rate_bps: int) -> Tree:
    settings = LinkSettings("eth0", rate_bps)
    return desired_tree(rate_bps, share_bps(rate_bps, settings.share), settings.bands)


@pytest.mark.parametrize("rate_bps", RATES_BPS)
def test_every_value_fits_the_kernels_fields(rate_bps: int) -> None:
    for item in tree_of(rate_bps).classes:
        assert 0 < item.burst_ticks < 2**32
        assert 0 < item.cburst_ticks < 2**32
        # Outside of this HTB logs "quantum of class is small" or "big".
        assert 1000 <= item.quantum_bytes <= 200_000
        assert 0 <= item.prio <= 7


@pytest.mark.parametrize("rate_bps", RATES_BPS)
def test_queues_hold_gso_packets_but_not_seconds(rate_bps: int) -> None:
    for leaf in tree_of(rate_bps).queues:
        assert isinstance(leaf.options, Bfifo)
        limit_bytes = leaf.options.limit_bytes
        assert limit_bytes >= 4 * GSO_BYTES
        assert limit_bytes <= max(4 * GSO_BYTES, rate_bps / 8 * 0.01)
        assert limit_bytes < 2**32


def test_lanes_are_strict_and_the_default_is_last_but_guaranteed() -> None:
    tree = tree_of(10**9)
    inner, *classes = tree.classes
    assert [item.prio for item in classes] == list(range(7))
    assert inner.rate_bps == inner.ceil_bps == 10**9
    assert {item.ceil_bps for item in classes} == {10**9}
    assert classes[-1].rate_bps == 50_000_000
    assert sum(item.rate_bps for item in classes[:-1]) < 10**9 / 1000
    assert tree.default_classid == classes[-1].classid == all_bands()[-1].classid


def test_a_band_does_not_run_out_before_the_link() -> None:
    inner, *classes = tree_of(10**9).classes
    assert all(item.cburst_ticks >= 2 * inner.burst_ticks for item in classes)


def test_burst_covers_a_late_timer() -> None:
    for rate_bps in RATES_BPS:
        inner = tree_of(rate_bps).classes[0]
        assert inner.burst_ticks * TICK_NS >= 1_000_000
