"""Replayed models: real parameters and real gradients, with the compute slept instead of done.

A replayed model is an ordinary nn.Module, so that DistributedDataParallel and tlsched train it
through their front doors, and a machine without GPUs shows what its network would have to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# VGG-16, configuration D of Simonyan and Zisserman (arXiv 1409.1556, table 1): output channels of
# the 3x3 convolutions, M for a 2x2 max-pool, then the widths of the fully connected layers.
VGG16_CONVOLUTIONS: tuple[int | str, ...] = (
    64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M",
)  # fmt: skip
VGG16_FULLY_CONNECTED = (4096, 4096, 1000)
IMAGE_SIDE = 224
IMAGE_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's number of parameters and its forward's multiply-adds (for one image)."""

    name: str
    parameters: int
    multiply_adds: int


def vgg16() -> list[Layer]:
    """VGG-16's layers, forward order, computed from its definition (138 million parameters)."""
    return [*_convolutions(), *_fully_connected()]


def _convolutions() -> Iterator[Layer]:
    channels, side = IMAGE_CHANNELS, IMAGE_SIDE
    number = 0
    for out in VGG16_CONVOLUTIONS:
        if isinstance(out, str):
            side //= 2
            continue
        number += 1
        weights = channels * out * 3 * 3
        yield Layer(f"conv{number}", weights + out, weights * side * side)
        channels = out


def _fully_connected() -> Iterator[Layer]:
    pools = VGG16_CONVOLUTIONS.count("M")
    channels = [c for c in VGG16_CONVOLUTIONS if isinstance(c, int)][-1]
    width = channels * (IMAGE_SIDE // 2**pools) ** 2
    for number, out in enumerate(VGG16_FULLY_CONNECTED, start=1):
        yield Layer(f"fc{number}", width * out + out, width * out)
        width = out


class ReplayedModel(nn.Module):
    """``layers`` in a row; one iteration sleeps ``compute_s``, two thirds of it in backward.

    ``scale`` multiplies every layer's number of parameters. Time is shared out by multiply-adds,
    backward costing twice the forward, as is usual for GPUs.
    """

    def __init__(self, layers: Sequence[Layer], *, compute_s: float, scale: float = 1.0) -> None:
        super().__init__()
        total = sum(layer.multiply_adds for layer in layers)
        for layer in layers:
            forward_s = compute_s / 3 * layer.multiply_adds / total
            count = max(1, round(layer.parameters * scale))
            self.add_module(layer.name, ReplayedLayer(count, forward_s, 2 * forward_s))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass ``x`` (any shape) through, sleeping."""
        for layer in self.children():
            x = layer(x)
        return x


class ReplayedLayer(nn.Module):
    """``count`` parameters, a forward of ``forward_s`` and a backward of ``backward_s`` seconds."""

    def __init__(self, count: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` plus the first weight, so that the result depends on what was learned."""
        replayed = _Replay.apply(x, self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert isinstance(replayed, torch.Tensor)
        return replayed


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        ctx.weight_like = weight
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ready_s = time.perf_counter() + ctx.backward_s
        (grad,) = grads
        # A constant gradient: producing it costs one pass over memory, as little as is possible,
        # and counts as part of the compute.
        gradient = torch.full_like(ctx.weight_like, float(grad.mean()))
        time.sleep(max(0.0, ready_s - time.perf_counter()))
        return grad, gradient, None, None


class ReplayedSGD(torch.optim.Optimizer):
    """Plain SGD on each parameter's first element, which is all that a replayed layer reads.

    A GPU updates 55 MB in a fraction of a millisecond, four ranks on two CPU cores take fifty; and
    the update lies between the last byte's arrival and the next backward under every policy.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Update; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter[:1].add_(parameter.grad[:1], alpha=-group["lr"])
