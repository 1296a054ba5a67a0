"""The lab's card passes at once what a tree releases at once, or its FIFO would undo the order."""

from __future__ import annotations

import pytest

from tlsched.bands import all_bands
from tlsched.lab.topology import burst_bytes
from tlsched.tc.tree import INNER_CLASSID, TICK_NS, desired_tree


@pytest.mark.parametrize("rate_bps", [10**8, 10**9, 10**10])
def test_a_trees_burst_is_smaller_than_the_cards(rate_bps: int) -> None:
    tree = desired_tree(rate_bps, rate_bps // 20, all_bands())
    inner = next(item for item in tree.classes if item.classid == INNER_CLASSID)
    released_bytes = inner.burst_ticks * TICK_NS * 1e-9 * rate_bps / 8
    assert released_bytes < burst_bytes(rate_bps)
