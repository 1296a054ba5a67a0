"""Faults that come from outside the loop: Ctrl-C, a stopped process, a handled exception."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import tlsched
from tests.training import loops, models
from tests.training.faulty import (
    MARGIN_S,
    SOON_S,
    Outcome,
    deep_net,
    train_with_faults,
)
from tests.training.ranks import RankPool, fresh_ranks


def _fails_while_entering(rank: int, _size: int) -> tuple[str, float]:
    net = models.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if rank == 1:
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT)).start()
    if rank == 2:
        time.sleep(8)
    began_s = time.monotonic()
    try:
        with tlsched.schedule(net, optimizer, timeout_s=60):
            return "entered", 0.0
    except BaseException as error:
        assert "step" not in optimizer.__dict__
        return f"{type(error).__name__}: {error}", time.monotonic() - began_s


def test_ctrl_c_while_entering_is_heard_and_told() -> None:
    """Rank 2 is late; rank 1 is interrupted while it waits for it."""
    with fresh_ranks(3) as pool:
        outcomes = pool.run(_fails_while_entering)
    assert outcomes[1][0].startswith("KeyboardInterrupt")
    assert outcomes[1][1] < 1 + SOON_S
    for rank in (0, 2):
        assert "rank 1" in outcomes[rank][0]
        assert "KeyboardInterrupt" in outcomes[rank][0]


def _handled_exception(rank: int, size: int, fault: str) -> list[Any]:
    """Parameters after leaving by an exception that every rank raises after the fifth step."""
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with tlsched.schedule(net, optimizer, policy="sync" if fault == "none" else "kernel"):
            for step, batch in enumerate(models.batches("mlp", rank, 9)):
                loops.backward(models.loss("mlp", net, batch))
                optimizer.step()
                optimizer.zero_grad()
                if step == 4:
                    if fault == "none":
                        break
                    raise StopIteration
    except StopIteration:
        pass
    return models.parameters(net)


def test_updates_that_step_promised_are_done_when_the_loop_raises(two_ranks: RankPool) -> None:
    """Early stopping by an exception, then a checkpoint: it must hold the last step."""
    expected = two_ranks.run(_handled_exception, "none")
    for ranks in zip(expected, two_ranks.run(_handled_exception, "raise"), strict=True):
        assert models.identical(*ranks)


def _enter(_rank: int, _size: int) -> None:
    net = models.mlp()
    with tlsched.schedule(net, torch.optim.SGD(net.parameters(), lr=0.1)):
        pass


def _train_slowly(rank: int, size: int, timeout_s: float) -> Outcome:
    return train_with_faults(rank, size, dict.fromkeys(range(size), _doze), "kernel", timeout_s)


def _doze(_run: tlsched.Run, _net: nn.Module) -> None:
    time.sleep(4)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_process_is_named_after_the_timeout(victim: int) -> None:
    """SIGSTOP. Rank 0 keeps the store as well, which then answers nobody."""
    with fresh_ranks(3) as pool:
        pool.run(_enter)  # started and warm
        pid = pool.processes[victim].pid
        assert pid is not None
        threading.Timer(3.0, os.kill, (pid, signal.SIGSTOP)).start()
        outcomes = pool.run(_train_slowly, 5.0, dying=1)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error == "CommunicationError"
        assert f"rank {victim}" in outcomes[rank].message
        assert outcomes[rank].seconds < 4 + 5 + MARGIN_S
