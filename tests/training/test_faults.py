"""Whatever goes wrong on one rank, the others end soon, with an error that names it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tlsched
from tests.training import loops, models
from tests.training.faulty import (
    MARGIN_S,
    SOON_S,
    deep_net,
    train_with_faults,
)
from tests.training.ranks import RankPool, fresh_ranks
from tlsched.errors import CommunicationError, RanksDisagree
from tlsched.shim import sockets

TIMEOUT_S = 4.0


def _raise(_run: tlsched.Run, _net: nn.Module) -> None:
    raise ValueError("a bad batch")


def _die(_run: tlsched.Run, _net: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep_long(_run: tlsched.Run, _net: nn.Module) -> None:
    time.sleep(2.5 * TIMEOUT_S)


def _interrupt_in_two_seconds(_run: tlsched.Run, _net: nn.Module) -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(2.0, signal.pthread_kill, (main, signal.SIGINT)).start()


def _reset_one_lane(run: tlsched.Run, _net: nn.Module) -> None:
    for connection in run._lanes[0].control.connections.values():
        sockets.cut(connection)


@pytest.mark.parametrize("policy", ["kernel", "sync"])
def test_exception_is_seen_and_the_others_name_the_rank(four_ranks: RankPool, policy: str) -> None:
    outcomes = four_ranks.run(train_with_faults, {2: _raise}, policy)
    assert (outcomes[2].error, outcomes[2].message) == ("ValueError", "a bad batch")
    assert outcomes[2].seconds < SOON_S
    for rank in (0, 1, 3):
        assert outcomes[rank].error == "CommunicationError"
        assert "rank 2 left: ValueError: a bad batch" in outcomes[rank].message
        assert outcomes[rank].seconds < MARGIN_S


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_is_named_by_all_others(victim: int) -> None:
    with fresh_ranks(3) as pool:
        outcomes = pool.run(train_with_faults, {victim: _die}, dying=1)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error == "CommunicationError"
        assert f"rank {victim} left" in outcomes[rank].message
        assert outcomes[rank].seconds < MARGIN_S


def test_ctrl_c_is_heard_while_waiting_for_others(two_ranks: RankPool) -> None:
    """Rank 1 is busy for long; rank 0 waits for it and is interrupted after two seconds."""
    outcomes = two_ranks.run(train_with_faults, {0: _interrupt_in_two_seconds, 1: _sleep_long})
    assert outcomes[0].error == "KeyboardInterrupt"
    assert 1.5 < outcomes[0].seconds < 2 + SOON_S + 5.0
    assert "rank 0 left: KeyboardInterrupt" in outcomes[1].message


def test_silent_rank_is_named_after_the_timeout(four_ranks: RankPool) -> None:
    outcomes = four_ranks.run(train_with_faults, {1: _sleep_long}, "kernel", TIMEOUT_S)
    for rank in (0, 2, 3):
        assert outcomes[rank].error == "CommunicationError"
        assert "rank 1 did not answer within 4 s" in outcomes[rank].message
        assert outcomes[rank].seconds < TIMEOUT_S + MARGIN_S
    assert outcomes[1].error == "CommunicationError"


def test_reset_sockets_end_training_everywhere(two_ranks: RankPool) -> None:
    outcomes = two_ranks.run(train_with_faults, {0: _reset_one_lane})
    for outcome, other in zip(outcomes, (1, 0), strict=True):
        assert outcome.error == "CommunicationError"
        assert f"rank {other} left" in outcome.message
        assert outcome.seconds < MARGIN_S


def _fewer(rank: int, _size: int, policy: str) -> tuple[str, str, float]:
    net = deep_net()
    optimizer = torch.optim.AdamW(net.parameters())
    began_s = time.monotonic()
    try:
        with tlsched.schedule(net, optimizer, policy=policy, timeout_s=60):
            for batch in models.batches("mlp", rank, 5 if rank == 1 else 9):
                loops.backward(models.loss("mlp", net, batch))
                optimizer.step()
                optimizer.zero_grad()
    except CommunicationError as error:
        return "CommunicationError", str(error), time.monotonic() - began_s
    return "", "", time.monotonic() - began_s


@pytest.mark.parametrize("policy", ["kernel", "sync"])
def test_rank_with_fewer_batches_is_named(four_ranks: RankPool, policy: str) -> None:
    outcomes = four_ranks.run(_fewer, policy)
    assert outcomes[1][0] == ""
    for rank in (0, 2, 3):
        error, message, seconds = outcomes[rank]
        assert error == "CommunicationError"
        assert "rank 1 left: its loop ended after 5 steps" in message
        assert seconds < MARGIN_S


def _enter(rank: int, _size: int, differs: str) -> str:
    torch.manual_seed(0)
    net = models.mlp()
    settings: dict[str, Any] = {}
    if rank == 1:
        if differs == "parameter":
            net.register_parameter("extra", nn.Parameter(torch.zeros(2)))
        elif differs == "shape":
            net[3] = nn.Linear(128, 64)  # type: ignore[operator]  # a Sequential
        elif differs == "dtype":
            net[5].to(torch.float64)  # type: ignore[index]  # a Sequential
        elif differs == "frozen":
            net[1].weight.requires_grad_(False)  # type: ignore[index]  # a Sequential
        elif differs == "policy":
            settings["policy"] = "fifo"
        elif differs == "dscps":
            settings["dscps"] = (40, 32, 24, 16, 12, 9)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    began_s = time.monotonic()
    try:
        with tlsched.schedule(net, optimizer, timeout_s=30, **settings):
            return "entered"
    except RanksDisagree as error:
        assert time.monotonic() - began_s < MARGIN_S
        return str(error)


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        ("parameter", "extra (2,)"),
        ("shape", "3.weight (64, 128)"),
        ("dtype", "5.weight (10, 128) strides (128, 1) torch.float64"),
        ("frozen", "1.weight (128, 64) strides (64, 1) torch.float32 trained, rank 1 has"),
        ("policy", "kernel, rank 1 has fifo"),
        ("dscps", "rank 1 has DSCPs (40, 32, 24, 16, 12, 9)"),
    ],
)
def test_first_difference_between_ranks_is_named(
    two_ranks: RankPool, differs: str, named: str
) -> None:
    for message in two_ranks.run(_enter, differs):
        assert "ranks disagree on the" in message
        assert named in message


def _one_stays_away(rank: int, _size: int) -> str:
    net = models.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if rank == 1:
        dist.barrier()
        return ""
    message = ""
    try:
        with tlsched.schedule(net, optimizer, timeout_s=2.0):
            pass
    except CommunicationError as error:
        message = str(error)
    dist.barrier()
    return message


def test_rank_that_never_enters_is_named(four_ranks: RankPool) -> None:
    messages = four_ranks.run(_one_stays_away)
    for rank in (0, 2, 3):
        assert "rank 1 did not tell the policy within 2 s" in messages[rank]
