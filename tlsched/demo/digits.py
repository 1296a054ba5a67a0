"""A small real training: scikit-learn's digits, a convolution, two large fully connected layers."""

from __future__ import annotations

import torch
from torch import nn

BATCH = 32
TEST_SHARE = 5  # every fifth image is held back for the accuracy


def model() -> nn.Module:
    """A convolutional network for 8x8 images whose bytes lie in its fully connected layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images (n, 1, 8, 8) in 0 to 1 with labels (n,), then the same for testing."""
    from sklearn.datasets import load_digits

    data, labels = load_digits(return_X_y=True)
    x = torch.tensor(data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    held_back = torch.arange(len(x)) % TEST_SHARE == 0
    return x[~held_back], y[~held_back], x[held_back], y[held_back]


def batches(
    rank: int, size: int, count: int, x: torch.Tensor, y: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` batches of this rank's share, the same ones every time."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))[rank::size]
    picks = [order[torch.arange(i * BATCH, (i + 1) * BATCH) % len(order)] for i in range(count)]
    return [(x[pick], y[pick]) for pick in picks]
