"""torch.compile, in every place where people put it: never a stale weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.training import compare
from tests.training.compare import Outcome, hold, listening, outcome, trainer
from tests.training.ranks import RankPool

BEFORE, LATE, NEVER = -2, 5, -1
FULL: Any = {"backend": "aot_eager", "fullgraph": True}


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape in, shape out."""
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return result


class Blocks(nn.Module):
    """Plain stem, two blocks, plain head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 16) to (rows, 4)."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


class Decorated(nn.Module):
    """Its forward is compiled where the class is written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    @torch.compile(**FULL)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 16) to (rows, 4)."""
        result: torch.Tensor = self.inner(x).tanh()
        return result


class Inner(nn.Module):
    """The same, not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 16) to (rows, 4)."""
        result: torch.Tensor = self.inner(x).tanh()
        return result


def _compile(net: Any, where: str, really: bool = True) -> Any:
    """What to call in place of ``net``, compiled at ``where``, or the same uncompiled."""
    if not really and not where.startswith("function"):
        return net
    if where == "blocks":
        for number, block in enumerate(net.blocks):
            net.blocks[number] = torch.compile(block, **FULL)
    elif where == "blocks in place":
        for block in net.blocks:
            block.compile(**FULL)
    elif where == "in place":
        net.compile(**FULL)
    elif where == "around":
        return torch.compile(net, **FULL)
    elif where == "function":
        return _maybe(lambda x: net(x) * 1.0, really)
    elif where == "function of weights":
        return _maybe(lambda x: net(x) + x @ net.stem.weight[:, :4], really)
    return net


def _maybe(function: Any, really: bool) -> Any:
    return torch.compile(function, **FULL) if really else function


def _compiled(rank: int, _size: int, policy: str, where: str, when: int) -> Outcome:
    torch._dynamo.reset()
    torch.manual_seed(3)
    net: Any = (Decorated if when != NEVER else Inner)() if where == "decorated" else Blocks()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    call = net
    if when in (BEFORE, NEVER) or where.startswith("function"):
        call = _compile(net, where, when == BEFORE)
        if when == BEFORE:  # compiled, and not merely wrapped
            call(torch.zeros(8, 16)).sum().backward()
            optimizer.zero_grad()
    with listening() as said, trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            if number == when:
                call = _compile(net, where)
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        whys = {row["why"] for row in t.run.report()}
    late = [w for w in said if "tlsched" in str(w.message)]
    return outcome(net, sorted(whys) if policy == "kernel" else [], late)


WHERES = (
    "blocks", "blocks in place", "in place", "around", "function", "function of weights",
    "decorated",
)  # fmt: skip


@pytest.mark.parametrize("when", [BEFORE, LATE], ids=["before", "late"])
@pytest.mark.parametrize("where", WHERES)
def test_compiled_code_never_reads_a_stale_weight(
    two_ranks: RankPool, where: str, when: int
) -> None:
    kernel = two_ranks.run(_compiled, "kernel", where, when)
    eager = two_ranks.run(_compiled, "sync", where, NEVER)
    for a, b in zip(kernel[0].parameters, eager[0].parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if where in ("blocks", "blocks in place", "in place") and when == BEFORE:
        assert kernel[0].said == []
        assert kernel[0].log == ["needed by forward"]


class Recomputed(nn.Module):
    """Checkpointed blocks; the stem's weight is read again inside one of them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape in, shape out."""

        def run(block: nn.Module, y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = block(y) @ self.stem.weight
            return result

        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(run, block, x, use_reentrant=self.reentrant)
        return x


def _recomputed(rank: int, _size: int, policy: str, reentrant: bool) -> Outcome:
    torch.manual_seed(3)
    net = Recomputed(reentrant and policy != "ddp")  # DDP cannot train a shared reentrant weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            t.forward(x.requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    return outcome(net)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_a_weight_of_another_module(
    two_ranks: RankPool, reentrant: bool
) -> None:
    hold(two_ranks, _recomputed, reentrant, rtol=1e-5)
