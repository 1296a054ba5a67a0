"""A small real language model: a transformer over the bytes of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 128  # ASCII; what is not becomes "?"
CONTEXT = 64
BATCH = 4
WIDTH = 256
HEADS = 4
LAYERS = 2
TEXT_BYTES = 500_000


class LanguageModel(nn.Module):
    """Predicts the next byte from those before it: embeddings, two transformer layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, CONTEXT, VOCABULARY) for ``tokens`` (batch, CONTEXT)."""
        x = self.token(tokens) + self.place(torch.arange(CONTEXT))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x))
        assert isinstance(logits, torch.Tensor)
        return logits


def model() -> nn.Module:
    """The language model, about 7 MB of parameters."""
    return LanguageModel()


def corpus() -> torch.Tensor:
    """Token numbers of the standard library's modules, one after another by their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in sorted(folder.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= TEXT_BYTES:
            break
    tokens = torch.frombuffer(data[:TEXT_BYTES], dtype=torch.uint8).long()
    return torch.where(tokens < VOCABULARY, tokens, ord("?"))


def batches(rank: int, size: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` batches of this rank's share, the same ones every time: tokens and their next."""
    tokens = corpus()
    chance = torch.Generator().manual_seed(7)
    starts = torch.randint(len(tokens) - CONTEXT - 1, (count, size, BATCH), generator=chance)
    found = []
    for step in starts[:, rank]:
        window = torch.stack([tokens[start : start + CONTEXT + 1] for start in step.tolist()])
        found.append((window[:, :-1], window[:, 1:]))
    return found


def loss(forward: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Cross entropy of the next byte, in nats."""
    logits = forward(batch[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
