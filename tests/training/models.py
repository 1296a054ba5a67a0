"""Models that tests train, their batches, and what a training leaves.

Each model is a factory in MODELS; ``batches(name, rank, count)`` makes its inputs and
``loss(name, net, batch)`` its loss. They are small: what matters is who reads which parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensors = list[torch.Tensor]
WIDTH = 32
WORDS = 50
CLASSES = 10
ROWS = 8


def small_cnn() -> nn.Module:
    """A convolution with BatchNorm and two fully connected layers; 8x8 images, ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 256),
        nn.ReLU(),
        nn.Linear(256, CLASSES),
    )


def mlp() -> nn.Module:
    """Three fully connected layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape in, shape out."""
        result: torch.Tensor = x + self.second(functional.relu(self.norm(self.first(x))))
        return result


def resnet() -> nn.Module:
    """A stem and two residual blocks."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), ResidualBlock(8), ResidualBlock(8), nn.Flatten(),
        nn.Linear(8 * 64, CLASSES),
    )  # fmt: skip


class Recurrent(nn.Module):
    """An LSTM, whose weights are read as one flat list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images' rows as time steps."""
        states, _ = self.lstm(x.squeeze(1))
        result: torch.Tensor = self.head(states[:, -1])
        return result


class Attention(nn.Module):
    """MultiheadAttention, whose projections never run their own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.encode = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images' rows as tokens."""
        tokens = self.embed(x.squeeze(1))
        tokens = tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0]
        result: torch.Tensor = self.head(self.encode(tokens).mean(1))
        return result


class VisionTransformer(nn.Module):
    """A class token and positions that the root module reads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 9, WIDTH) / 10)
        self.embed = nn.Linear(8, WIDTH)
        self.encode = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images' rows as tokens behind the class token."""
        rows = self.embed(x.squeeze(1))
        tokens = torch.cat([self.token.expand(len(x), -1, -1), rows], 1) + self.positions
        result: torch.Tensor = self.head(self.encode(tokens)[:, 0])
        return result


class TiedLanguageModel(nn.Module):
    """Embedding and output layer share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next word at each place."""
        result: torch.Tensor = self.out(torch.tanh(self.mix(self.embed(tokens))))
        return result


class UnusedBranch(nn.Module):
    """A branch that no iteration reaches, and one that only every other iteration does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.never = nn.Linear(64, 64)
        self.sometimes = nn.Linear(64, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sign of the first pixel decides, so ranks may differ."""
        x = torch.relu(self.first(x.flatten(1)))
        if float(x.detach().sum()) % 2 < 1:
            x = torch.relu(self.sometimes(x))
        result: torch.Tensor = self.head(x)
        return result


class Checkpointed(nn.Module):
    """Two checkpointed blocks, one used twice; ``reentrant`` picks the flavour."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(64, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block runs twice, recomputed in backward."""
        x = torch.relu(self.stem(x.flatten(1)))
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        result: torch.Tensor = self.head(x)
        return result


class Compiled(nn.Module):
    """A block under torch.compile inside an ordinary module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.block = torch.compile(block, backend="aot_eager")
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Plain, compiled, plain."""
        result: torch.Tensor = self.head(self.block(self.stem(x.flatten(1))))
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": small_cnn,
    "resnet": resnet,
    "lstm": Recurrent,
    "attention": Attention,
    "vit": VisionTransformer,
    "tied": TiedLanguageModel,
    "unused": UnusedBranch,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "compiled": Compiled,
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=1e-2),
}


def batches(name: str, rank: int, count: int) -> list[Any]:
    """``count`` batches for the model ``name``, different on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    if name == "tied":
        return [torch.randint(0, WORDS, (ROWS, 12), generator=generator) for _ in range(count)]
    return [
        (
            torch.randn(ROWS, 1, 8, 8, generator=generator),
            torch.randint(0, CLASSES, (ROWS,), generator=generator),
        )
        for _ in range(count)
    ]


def loss(name: str, net: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy of the labels, or of the next word."""
    if name == "tied":
        scores = net(batch[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
    return functional.cross_entropy(net(batch[0]), batch[1])


def parameters(net: nn.Module) -> Tensors:
    """Copies of the parameters."""
    return [p.detach().clone() for p in net.parameters()]


def identical(a: Tensors, b: Tensors) -> bool:
    """Whether all tensors are equal bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
