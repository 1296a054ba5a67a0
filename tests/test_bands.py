"""The marks table: what the administrator may choose, and what may not be chosen by accident."""

from __future__ import annotations

import pytest

from tlsched.bands import (
    DEFAULT_BAND,
    DEFAULT_DSCPS,
    all_bands,
    lane_bands,
    priority_set_by_tos,
)
from tlsched.errors import ConfigError


def test_lanes_fall_in_priority_and_never_need_a_privilege() -> None:
    assert [band.priority for band in lane_bands()] == [6, 5, 4, 3, 2, 1]
    assert [band.dscp for band in lane_bands()] == list(DEFAULT_DSCPS)


def test_every_band_has_a_class_of_its_own() -> None:
    bands = all_bands()
    assert [band.order for band in bands] == list(range(7))
    assert len({band.classid for band in bands}) == 7
    assert bands[-1].name == DEFAULT_BAND
    assert bands[-1].tos is None


@pytest.mark.parametrize(
    ("dscps", "complaint"),
    [
        ((40, 32, 24, 16, 12), "6 distinct DSCPs"),
        ((40, 32, 24, 16, 12, 40), "6 distinct DSCPs"),
        ((40, 32, 24, 16, 12, 0), "DSCP 0 is out of range"),
        ((40, 32, 24, 16, 12, 64), "DSCP 64 is out of range"),
        ((48, 32, 24, 16, 12, 8), "DSCP 48 belongs to network control"),
        ((56, 32, 24, 16, 12, 8), "DSCP 56 belongs to network control"),
    ],
)
def test_unsuitable_code_points_are_refused(dscps: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        lane_bands(dscps)


@pytest.mark.parametrize(
    ("lane", "dscp"),
    [(lane, dscp) for lane in range(6) for dscp in range(1, 64) if dscp not in (48, 56)],
)
def test_a_dscp_that_brings_its_lanes_priority_is_refused(lane: int, dscp: int) -> None:
    spare = [d for d in DEFAULT_DSCPS if d != dscp]
    dscps = [dscp if i == lane else spare.pop(0) for i in range(6)]
    both_at_once = any(priority_set_by_tos(d) == 6 - i for i, d in enumerate(dscps))
    if both_at_once:
        with pytest.raises(ConfigError, match="does not suit lane"):
            lane_bands(dscps)
    else:
        assert lane_bands(dscps)[lane].dscp == dscp
