"""Warnings point at the line of the training loop that they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tlsched
from tests.training import compare
from tests.training.compare import Wide, listening
from tests.training.ranks import RankPool

_LINES = Path(__file__).read_text().splitlines()


def _said(rank: int, _size: int) -> list[tuple[str, str, str]]:
    """What was said, in which file, at which line's text."""
    net = Wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    extra = torch.nn.Parameter(torch.zeros(2))
    with listening() as said, tlsched.schedule(net, optimizer, policy="fifo"):
        for number, x in enumerate(compare.data(rank, 6)):
            if number == 4:
                optimizer.add_param_group({"params": [extra]})
                extra.grad = torch.ones(2)
            loss: Any = net(x).square().mean()
            loss.backward(create_graph=number == 1)
            optimizer.step()
            optimizer.zero_grad()
    mine = [w for w in said if str(w.message).startswith("tlsched:")]
    lines = [_LINES[w.lineno - 1].strip() if w.filename == __file__ else "" for w in mine]
    return [(str(w.message), w.filename, line) for w, line in zip(mine, lines, strict=True)]


def test_warnings_point_at_the_users_own_line(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_said):
        at = {message.removeprefix("tlsched: ")[:24]: line for message, _, line in said}
        assert at == {
            "gradients of gradients a": "loss.backward(create_graph=number == 1)",
            "step() waits for all gra": "optimizer.step()",
            "a parameter of shape (2,": "optimizer.step()",
        }, said
