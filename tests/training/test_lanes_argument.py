"""schedule(lanes=…): a training keeps to the lanes that it was given, in marks and in its plan."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tlsched
from tests.training import loops, models
from tests.training.ranks import RankPool
from tests.training.test_sockets import _net
from tlsched.bands import check_lanes, lane_bands
from tlsched.errors import ConfigError, RanksDisagree

STEPS = 12  # more than it takes until lanes are chosen by measured time


def _marks(fd: int) -> tuple[int, int]:
    with socket.socket(fileno=os.dup(fd)) as sock:
        tos = sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY), tos


def _train(rank: int, _size: int, lanes: list[int] | None, policy: str = "kernel") -> Any:
    """Marks of each lane's sockets, the report's lanes, and a sum over the parameters."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tlsched.schedule(net, optimizer, policy=policy, lanes=lanes) as run:
        marks = [[_marks(c.fd) for c in lane.control.marked] for lane in run._lanes]
        for batch in models.batches("mlp", rank, STEPS):
            loops.backward(models.loss("mlp", net, batch))
            optimizer.step()
            optimizer.zero_grad()
        chosen = run.profile is not None
        assert chosen == (len(run._lanes) > 1), "lanes were not chosen anew"
        used = sorted({row["lane"] for row in run.report()})
    return marks, used, float(sum(p.detach().double().sum() for p in net.parameters()))


@pytest.mark.parametrize("lanes", [[3, 4, 5], [1, 4], [5]])
def test_sockets_carry_the_marks_of_the_given_lanes(two_ranks: RankPool, lanes: list[int]) -> None:
    every = lane_bands()
    _, _, expected = two_ranks.run(_train, None)[0]
    for marks, used, total in two_ranks.run(_train, lanes):
        assert marks == [[(every[lane].priority, every[lane].tos)] for lane in lanes]
        assert set(used) <= set(lanes)
        assert len(used) > 1 or len(lanes) == 1, "the test wants buckets on several lanes"
        assert total == expected


def test_unmarked_lanes_can_be_fewer_too(two_ranks: RankPool) -> None:
    for marks, used, _ in two_ranks.run(_train, [0, 1], "lanes"):
        assert marks == [[(0, 0)], [(0, 0)]]
        assert set(used) <= {0, 1}


@pytest.mark.parametrize("lanes", [[], [1, 1], [2, 1], [6], [-1, 2], range(7)])
def test_lanes_that_there_are_not_are_refused(lanes: list[int]) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        check_lanes(lanes)


def _refused(_rank: int, _size: int, policy: str, lanes: list[int]) -> str:
    net = _net()
    with pytest.raises(ConfigError) as told:
        tlsched.schedule(net, torch.optim.SGD(net.parameters(), lr=0.1), policy=policy, lanes=lanes)
    return str(told.value)


@pytest.mark.parametrize(
    ("policy", "lanes", "said"),
    [("fifo", [0, 1], "spreads nothing"), ("kernel", [3, 2], "cannot be used")],
)
def test_a_bad_request_is_refused_before_anything_is_opened(
    two_ranks: RankPool, policy: str, lanes: list[int], said: str
) -> None:
    for message in two_ranks.run(_refused, policy, lanes):
        assert said in message


def _disagree(rank: int, _size: int) -> str:
    net = _net()
    lanes = range(3) if rank == 0 else range(3, 6)
    run = tlsched.schedule(net, torch.optim.SGD(net.parameters(), lr=0.1), lanes=lanes)
    enter: Callable[[], object] = run.__enter__
    with pytest.raises(RanksDisagree) as told:
        enter()
    return str(told.value)


def test_ranks_with_other_lanes_are_told(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_disagree):
        assert "lanes (0, 1, 2), rank 1 has lanes (3, 4, 5)" in message
