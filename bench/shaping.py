"""Which share of its rate an attached link reaches, two bulk flows in lane 0, by rate and MTU."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from bench.record import spread
from tests import netns
from tests.tc.traffic import flow, link_rate_bps
from tlsched.bands import lane_bands
from tlsched.config import parse_rate

RATES = ("100mbit", "1gbit", "10gbit")
MTUS = (1500, 9000)
FLOWS = 2
WINDOW_S = 1.0


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a rate and MTU: what the link class sent in windows of a second over the rate."""
    pair = netns.make_pair()
    try:
        return [
            {"rate": rate, "mtu": mtu, "share": spread(_shares(pair, rate, mtu, rounds))}
            for rate in RATES
            for mtu in MTUS
        ]
    finally:
        for end in (pair.a, pair.b):
            netns.remove(end.name)


def _shares(pair: netns.Pair, rate: str, mtu: int, windows: int) -> list[float]:
    for end in (pair.a, pair.b):
        end.run("ip", "link", "set", end.dev, "mtu", str(mtu))
    pair.a.run(sys.executable, "-m", "tlsched", "attach", "-i", pair.a.dev, "--rate", rate)
    with ExitStack() as stack:
        for _ in range(FLOWS):
            stack.enter_context(flow(pair, lane_bands()[0]))
        time.sleep(WINDOW_S)
        return [link_rate_bps(pair.a, WINDOW_S) / parse_rate(rate) for _ in range(windows)]
