"""Models x optimizers x loops: DDP's parameters, and the same bits under sync and kernel."""

from __future__ import annotations

import pytest
import torch

from tests.training import loops, models
from tests.training.ranks import RankPool

STEPS = 10


def _train_under_each(
    rank: int, size: int, model: str, optimizer: str, loop: str
) -> list[models.Tensors]:
    """One process group for all three: making one costs as much as a training."""
    return [
        loops.train(rank, size, policy, model, optimizer, loop, STEPS)
        for policy in ("ddp", "sync", "kernel")
    ]


@pytest.mark.parametrize("loop", loops.LOOPS)
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
@pytest.mark.parametrize("model", models.MODELS)
def test_parameters_are_ddps_and_policies_agree(
    two_ranks: RankPool, model: str, optimizer: str, loop: str
) -> None:
    ranks = two_ranks.run(_train_under_each, model, optimizer, loop)
    ddp, sync, kernel = zip(*ranks, strict=True)
    assert models.identical(kernel[0], kernel[1]), "ranks diverged"
    assert models.identical(sync[0], kernel[0])
    for ours, theirs in zip(kernel[0], ddp[0], strict=True):
        # Relative to the tensor's scale: single weights pass through zero.
        scale = float(theirs.abs().max())
        # Reentrant blocks used twice accumulate in another order than the flavour DDP can train.
        part = 2e-6 if model == "reentrant" else 1e-6
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=part * scale)
