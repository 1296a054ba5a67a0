"""Benchmarks that train over a lab, as short as they can be: that they run, not what they find."""

from __future__ import annotations

import os
import sys

import pytest

from bench import congestion, contention, step
from bench.step import Setting
from tlsched.lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.slow]

TINY = Setting("vgg16", 1.0, 2, 10**9, communication_s=0.02)
SHOW = "import socket as s; print(s.socket().getsockopt(s.IPPROTO_TCP, s.TCP_CONGESTION, 16))"


def _say(_what: str) -> None:
    """Nobody looks."""


def test_step_tries_ddps_buckets_and_shards() -> None:
    policies = ["ddp-best", "fsdp2", "kernel"]
    rows, lab = step.measure(TINY, policies, 1, _say, iterations=2, quick=True)
    assert [row["policy"] for row in rows] == policies
    assert rows[0]["bucket_cap_mb"] in (1, 5, 25, 100)
    assert lab["counters"]["after"]["h0"]["bytes"] > lab["counters"]["before"]["h0"]["bytes"]
    assert lab["host"]["offloads"]["gro"]


def test_contention_tells_what_the_flows_got() -> None:
    rows, _ = contention.measure(["kernel"], [0, 2], 1, _say, setting=TINY, iterations=100)
    assert rows[0]["bulk_bps"] == 0
    assert 0 < rows[1]["bulk_bps"] < 10**9
    assert 0.3 < rows[1]["link_use"] < 1.05


def test_congestion_controls_take_turns() -> None:
    rows, _ = congestion.measure(1, _say, setting=TINY, iterations=1)
    assert [row["congestion"] for row in rows] == congestion.present()


def test_what_a_host_opens_has_the_labs_congestion_control() -> None:
    with Lab(1, 10**9, f"t{os.getpid()}") as lab:
        for name in congestion.present():
            lab.set_congestion(name)
            shown = lab.run(0, [sys.executable, "-c", SHOW], capture_output=True, text=True)
            assert name in shown.stdout
