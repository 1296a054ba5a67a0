"""Rank 0's orders on real sockets: kept when early, lost when the other end is gone, guarded."""

from __future__ import annotations

import queue
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tlsched.shim.orders import Follower, Leader, Order, OrdersLost, _accept

SOON_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[Leader, Follower]]:
    ours, theirs = socket.socketpair()
    leader, follower = Leader({1: ours}, None), Follower(theirs)
    yield leader, follower
    follower.close()
    leader.close()


def test_an_order_for_a_round_that_has_not_begun_here_is_kept(
    ends: tuple[Leader, Follower],
) -> None:
    leader, follower = ends
    heard: queue.Queue[Order | None] = queue.Queue()
    for number in (1, 2):
        leader.begin_round()
        leader.tell(64 * number, [3, number])
    for number in (1, 2):
        follower.begin_round(heard.put, lambda: heard.put(None))
        assert heard.get(timeout=SOON_S) == Order(number, 64 * number, (3, number))
        assert heard.empty()


def test_a_leader_that_leaves_is_told_after_its_last_order(ends: tuple[Leader, Follower]) -> None:
    leader, follower = ends
    heard: queue.Queue[Order | None] = queue.Queue()
    leader.begin_round()
    leader.tell(64, [0])
    leader.close()
    follower.begin_round(heard.put, lambda: heard.put(None))
    assert heard.get(timeout=SOON_S) == Order(1, 64, (0,))
    assert heard.get(timeout=SOON_S) is None
    follower.begin_round(heard.put, lambda: heard.put(None))
    assert heard.get(timeout=SOON_S) is None


def test_a_follower_that_left_is_named() -> None:
    ours, theirs = socket.socketpair()
    leader = Leader({5: ours}, None)
    theirs.close()
    leader.begin_round()
    with pytest.raises(OrdersLost) as lost:
        leader.tell(64, [1])
    assert lost.value.rank == 5
    leader.close()


def test_whoever_does_not_know_the_token_is_turned_away() -> None:
    token = bytes(range(16))
    agreement: Any = SimpleNamespace(size=2, timeout_s=5.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with (
            socket.create_connection(address) as stranger,
            socket.create_connection(address) as follower,
        ):
            stranger.sendall(struct.pack("!16sI", bytes(16), 1))
            follower.sendall(struct.pack("!16sI", token, 1))
            found = _accept(agreement, {"127.0.0.1": listener}, token)
            assert list(found) == [1]
            assert found[1].getpeername() == follower.getsockname()
            assert stranger.recv(1) == b"", "its connection is closed"
            found[1].close()
