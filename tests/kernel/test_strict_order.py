"""The order in which packets leave a device that is slower than its senders."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from tests.kernel.hostcli import attach, status
from tests.kernel.slowline import PEER, Line, slow_line
from tests.kernel.trees import KINDS, need
from tests.netns import Namespace
from tests.tc.traffic import mark
from tlsched.bands import all_bands

pytestmark = [
    pytest.mark.root,
    pytest.mark.stock_kernel,
    pytest.mark.usefixtures("compiled_once"),
]
Make = Callable[[], Namespace]
SO_SNDBUFFORCE = 32  # <asm-generic/socket.h>
LANES = all_bands()[:-1]
# What has left the tree before the urgent packets come: one on the line, one in the device's
# hands, one that a qdisc took out to look at (qdisc_peek_dequeued), for each of two levels.
UNDER_WAY = 4


def send(line: Line, lane: int | None, count: int, size: int = 1000) -> None:
    sock = line.host.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 4 << 20)
        mark(sock, None if lane is None else LANES[lane])
        for _ in range(count):
            sock.sendto(bytes(size), (PEER, 9))


def order(line: Line, count: int) -> list[int]:
    """The DSCPs of the next ``count`` UDP packets, as they leave."""
    seen = [packet[1] >> 2 for packet in line.frames(wait_s=5) if packet[9] == socket.IPPROTO_UDP]
    assert len(seen) == count
    return seen


@pytest.mark.parametrize("name", ["ets", "prio"])
def test_the_more_urgent_lane_goes_first(make_netns: Make, name: str) -> None:
    need(*KINDS[name].needs)
    with slow_line(make_netns) as line:
        attach(line.host, line.dev, **KINDS[name].settings)
        for lane in (5, 4, 3, 2, 1, 0):
            send(line, lane, 20)
        seen = order(line, 120)
        assert status(line.host, line.dev)[0].state == "attached"
    under_way, rest = seen[:UNDER_WAY], seen[UNDER_WAY:]
    rank = [band.dscp or 0 for band in LANES]
    assert rest == sorted(rest, key=rank.index)
    assert set(under_way) <= {rank[5], rank[0]}


@pytest.mark.parametrize(("share", "least", "most"), [(0.5, 60, 70), (0.2, 250, 265)])
def test_the_default_band_has_its_share_under_busy_lanes(
    make_netns: Make, share: float, least: int, most: int
) -> None:
    need("ets")
    with slow_line(make_netns) as line:
        attach(line.host, line.dev, rate=None, default_share=share)
        send(line, 0, 500)
        send(line, None, 100)
        seen = order(line, 600)
    before_it = seen.index(0)
    assert least <= before_it <= most  # lanes' packets in one round, of 64 KiB or four times that
    turns = seen[before_it:].index(LANES[0].dscp or 0)
    assert 60 <= turns <= 70  # 64 KiB of the default band, 1028 bytes a packet


def test_without_a_share_the_lanes_go_first(make_netns: Make) -> None:
    need("prio")
    with slow_line(make_netns) as line:
        attach(line.host, line.dev, rate=None, default_share=0.0)
        send(line, None, 50)
        send(line, 5, 100)
        seen = order(line, 150)
    assert seen[UNDER_WAY:].count(0) >= 50 - UNDER_WAY
    assert 0 not in seen[UNDER_WAY : UNDER_WAY + 100 - UNDER_WAY]


@pytest.mark.parametrize("lane", [None, 0])
def test_a_change_in_place_loses_nothing_that_waits(make_netns: Make, lane: int | None) -> None:
    need("ets")
    with slow_line(make_netns) as line:
        attach(line.host, line.dev, rate=None)
        send(line, lane, 50)
        changed = attach(line.host, line.dev, rate=None, default_share=0.5)
        assert all(text.startswith("change ") for text in changed.changes)
        order(line, 50)
