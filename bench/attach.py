"""For how long a busy link stands still while it is attached, changed and detached."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from bench.record import spread
from tests import netns
from tests.tc.stops import Stops
from tests.tc.traffic import flow
from tlsched import control
from tlsched.bands import all_bands
from tlsched.config import LinkSettings

BUSY_S = 0.3
RATE_BPS = 1_000_000_000


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row a command: the longest time in which a packet every half millisecond went unheard.

    Two TCP flows fill the link meanwhile. "nothing" is how long it is without any command: what
    the machine itself does to the packets.
    """
    pair = netns.make_pair()
    try:
        stops: dict[str, list[float]] = {}
        with ExitStack() as stack:
            for band in (None, all_bands()[2]):
                stack.enter_context(flow(pair, band))
            for _ in range(rounds):
                for name, action in _commands(pair.a).items():
                    with Stops(pair, all_bands()[0]) as measured:
                        time.sleep(BUSY_S)
                        pair.a.call(action)
                    stops.setdefault(name, []).append(measured.longest_s * 1000)
        return [{"command": name, "ms": spread(values)} for name, values in stops.items()]
    finally:
        for end in (pair.a, pair.b):
            netns.remove(end.name)


def _commands(end: netns.End) -> dict[str, Any]:
    return {
        "nothing": lambda: time.sleep(BUSY_S),
        "attach": lambda: control.attach(LinkSettings(end.dev, RATE_BPS)),
        "attach, other rate": lambda: control.attach(LinkSettings(end.dev, 2 * RATE_BPS)),
        "attach, same": lambda: control.attach(LinkSettings(end.dev, 2 * RATE_BPS)),
        "detach": lambda: control.detach(end.dev),
    }
