"""Profiles: kept as JSON, combined over iterations and ranks, and refused where they cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.profiles import FABRIC, equal_layers, layered, profiles
from tlsched.errors import ConfigError
from tlsched.planning.compare import SIMULATED, expect, verdict
from tlsched.planning.planner import plan_for
from tlsched.planning.profile import (
    BucketProfile,
    Profile,
    load_profile,
    median_profile,
    slowest_profile,
)


def test_a_profile_is_the_same_after_it_was_kept(tmp_path: Path) -> None:
    plain = equal_layers(5, 1000, 1.0)
    kinds = (replace(plain.buckets[0], kind="float32 cuda:0"), *plain.buckets[1:])
    for profile in (plain, replace(plain, buckets=kinds)):
        profile.save(tmp_path / "p.json")
        assert load_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"buckets": []},
        {"buckets": [{"names": ["p"], "bytes": -1, "ready_s": 0, "needed_s": 0}]},
        {"buckets": [{"names": ["p"], "bytes": 1, "ready_s": 9e9, "needed_s": 0}]},
        {"buckets": [{"names": ["p"], "bytes": 1, "ready_s": float("nan"), "needed_s": 0}]},
        {"buckets": [{"names": ["p"], "bytes": 10**300, "ready_s": 0, "needed_s": 0}]},
        {"buckets": 3},
        {"forward_s": float("inf")},
        {"forward_s": -1.0},
        {"backward_s": 1e300},
        {"backward_s": "soon"},
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "p.json"
    equal_layers(3, 1000, 1.0).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError):
        load_profile(path)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        load_profile(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        equal_layers(3, 1000, 1.0).save(tmp_path)
    for content in (b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"1e999"):
        (tmp_path / "bytes").write_bytes(content)
        with pytest.raises(ConfigError, match="is not a profile"):
            load_profile(tmp_path / "bytes")


@given(profiles(), st.lists(st.floats(0.5, 2.0), min_size=1, max_size=5))
def test_the_slowest_rank_and_the_median_iteration(profile: Profile, speeds: list[float]) -> None:
    def slower(factor: float) -> Profile:
        buckets = tuple(
            replace(b, ready_s=b.ready_s * factor, needed_s=b.needed_s * factor)
            for b in profile.buckets
        )
        return Profile(buckets, profile.forward_s * factor, profile.backward_s * factor)

    runs = [slower(speed) for speed in speeds]
    assert slowest_profile(runs) == slower(max(speeds))
    middle = median_profile(runs)
    assert min(speeds) - 1e-9 <= middle.compute_s / profile.compute_s <= max(speeds) + 1e-9


@pytest.mark.parametrize(
    "profile",
    [
        layered([0, 0], [1.0, 1.0]),
        layered([1000, 0, 10], [0.0, 0.0, 0.0]),
        Profile((BucketProfile(("p",), 1, 0.0, 0.0),), 0.0, 0.0),
    ],
    ids=["nothing to send", "nothing to compute", "next to nothing"],
)
def test_odd_profiles_are_planned_too(profile: Profile) -> None:
    assert len(plan_for(profile, FABRIC).buckets) >= 1
    found = expect(profile, FABRIC, SIMULATED)
    assert all(one.iteration_s >= 0 for one in found.values())
    assert "communication is" in verdict(found, profile, FABRIC, "1gbit")
