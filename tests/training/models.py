"""Models that tests train, their batches, and what a training leaves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Tensors = list[torch.Tensor]


def small_cnn() -> nn.Module:
    """A convolution with BatchNorm and two fully connected layers; 8x8 images, ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def image_batches(rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` batches of eight images and labels, different on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (
            torch.randn(8, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (8,), generator=generator),
        )
        for _ in range(count)
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3),
}


def parameters(net: nn.Module) -> Tensors:
    """Copies of the parameters."""
    return [p.detach().clone() for p in net.parameters()]


def identical(a: Tensors, b: Tensors) -> bool:
    """Whether all tensors are equal bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
