"""A worker or a server that dies or stops: all others end soon, with an error that names it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

import tlsched
from tests.training import models
from tests.training.faulty import MARGIN_S, SOON_S, Fault, train_with_faults
from tests.training.ranks import RankPool, fresh_ranks
from tests.training.serving import servers
from tlsched.errors import CommunicationError

TIMEOUT_S = 4.0
COLOCATED = {"backend": "ps"}


def _raise(_run: tlsched.Run, _net: nn.Module) -> None:
    raise ValueError("a bad batch")


def _die(_run: tlsched.Run, _net: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep_long(_run: tlsched.Run, _net: nn.Module) -> None:
    time.sleep(2.5 * TIMEOUT_S)


def _signal_server(run: tlsched.Run, number: int) -> None:
    child = run._lanes[0].session.child  # type: ignore[attr-defined]  # a ServedLane
    os.kill(child.pid, number)


def _kill_server(run: tlsched.Run, _net: nn.Module) -> None:
    _signal_server(run, signal.SIGKILL)


@dataclass
class _Signal:
    """A fault: ``number`` to another process."""

    pid: int
    number: signal.Signals

    def __call__(self, _run: tlsched.Run, _net: nn.Module) -> None:
        os.kill(self.pid, self.number)
        time.sleep(2.0)  # or the training might be over before


def _stop_server(run: tlsched.Run, _net: nn.Module) -> None:
    _signal_server(run, signal.SIGSTOP)


@pytest.mark.parametrize("policy", ["kernel", "fifo", "bytescheduler"])
def test_exception_is_seen_and_the_others_name_the_rank(four_ranks: RankPool, policy: str) -> None:
    outcomes = four_ranks.run(train_with_faults, {2: _raise}, policy, 60.0, COLOCATED)
    assert (outcomes[2].error, outcomes[2].message) == ("ValueError", "a bad batch")
    assert outcomes[2].seconds < SOON_S
    for rank in (0, 1, 3):
        assert outcomes[rank].error == "CommunicationError"
        assert "rank 2 left: ValueError: a bad batch" in outcomes[rank].message
        assert outcomes[rank].seconds < MARGIN_S


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_worker_is_named_by_all_others(victim: int) -> None:
    """Rank 0 takes the server that it started with it, and the ranks' store."""
    with fresh_ranks(3) as pool:
        outcomes = pool.run(train_with_faults, {victim: _die}, "kernel", 60.0, COLOCATED, dying=1)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error == "CommunicationError"
        assert f"rank {victim} left" in outcomes[rank].message
        assert outcomes[rank].seconds < MARGIN_S


@pytest.mark.parametrize("fault", [_kill_server, _stop_server])
def test_server_that_dies_or_stops_is_named_by_all(four_ranks: RankPool, fault: Fault) -> None:
    outcomes = four_ranks.run(train_with_faults, {0: fault}, "kernel", TIMEOUT_S, COLOCATED)
    said = "left" if fault is _kill_server else "did not answer within 4 s"
    for outcome in outcomes:
        assert outcome.error == "CommunicationError"
        assert "server 0 (127.0.0.1:" in outcome.message
        assert said in outcome.message
        assert outcome.seconds < TIMEOUT_S + MARGIN_S


def test_rank_that_serves_and_is_killed_is_named() -> None:
    with fresh_ranks(4) as pool:
        pid = pool.processes[3].pid
        assert pid is not None
        faults = {0: _Signal(pid, signal.SIGKILL)}
        over: dict[str, Any] = {"backend": "ps", "servers": 2}
        outcomes = pool.run(train_with_faults, faults, "kernel", 60.0, over, dying=1)
    for worker in outcomes[:2]:
        assert worker.error == "CommunicationError"
        assert "server 1, rank 3 (127.0.0.1:" in worker.message
        assert worker.seconds < MARGIN_S
    assert outcomes[2].error == "CommunicationError"
    assert "the job that this rank served ended" in outcomes[2].message


def test_silent_worker_is_named_after_the_timeout(four_ranks: RankPool) -> None:
    outcomes = four_ranks.run(train_with_faults, {1: _sleep_long}, "kernel", TIMEOUT_S, COLOCATED)
    for rank in (0, 2, 3):
        assert outcomes[rank].error == "CommunicationError"
        assert "rank 1 did not answer within 4 s" in outcomes[rank].message
    assert outcomes[1].error == "CommunicationError"


def _fewer(rank: int, _size: int) -> str:
    from tests.training import faulty

    net = faulty.deep_net()
    optimizer = models.OPTIMIZERS["sgd"](net)
    try:
        with tlsched.schedule(net, optimizer, backend="ps", timeout_s=60.0):
            for batch in models.batches("mlp", rank, 5 if rank == 1 else 9):
                faulty.step(net, optimizer, batch)
    except CommunicationError as error:
        return str(error)
    return ""


def test_rank_with_fewer_batches_is_named(four_ranks: RankPool) -> None:
    messages = four_ranks.run(_fewer)
    assert messages[1] == ""
    for rank in (0, 2, 3):
        assert "rank 1 left: its loop ended after 5 steps" in messages[rank]


def _enter(_rank: int, _size: int, addresses: list[str], token: str = "") -> str:
    os.environ["TLSCHED_SERVER_TOKEN"] = token
    net = models.mlp()
    optimizer = models.OPTIMIZERS["sgd"](net)
    try:
        with tlsched.schedule(net, optimizer, backend="ps", servers=addresses, timeout_s=30):
            return "entered"
    except CommunicationError as error:
        return str(error)
    finally:
        del os.environ["TLSCHED_SERVER_TOKEN"]


def test_server_goes_on_after_a_job_that_failed(two_ranks: RankPool) -> None:
    with servers(2) as started:
        addresses = [one.address for one in started]
        over: dict[str, Any] = {"backend": "ps", "servers": addresses}
        outcomes = two_ranks.run(train_with_faults, {1: _raise}, "kernel", 60.0, over)
        assert "rank 1 left: ValueError: a bad batch" in outcomes[0].message
        outcomes = two_ranks.run(train_with_faults, {}, "kernel", 60.0, over)
        assert [outcome.error for outcome in outcomes] == ["", ""]


def test_wrong_token_is_refused_on_all_ranks(two_ranks: RankPool) -> None:
    with servers(1, token="right") as (server,):
        for message in two_ranks.run(_enter, [server.address], "wrong"):
            assert "server 0 (127.0.0.1:" in message
            assert "its token is not this server's" in message
        assert two_ranks.run(_enter, [server.address], "right") == ["entered", "entered"]


def test_server_that_is_stopped_by_its_operator_says_so(two_ranks: RankPool) -> None:
    with servers(1) as (server,):
        over: dict[str, Any] = {"backend": "ps", "servers": [server.address]}
        faults = {0: _Signal(server.process.pid, signal.SIGTERM)}
        outcomes = two_ranks.run(train_with_faults, faults, "kernel", 60.0, over)
        for outcome in outcomes:
            assert "server 0" in outcome.message
            assert "it was stopped" in outcome.message
        assert server.process.wait(10) == 0


def test_absent_server_is_named(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_enter, ["127.0.0.1:1"]):
        assert "server 0 (127.0.0.1:1) cannot be reached" in message
