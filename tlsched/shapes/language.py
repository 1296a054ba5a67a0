"""Definitions of BERT-large, GPT-2 medium and a Llama-style decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """What makes a transformer large: ``inner`` is its feed-forward layer's width."""

    blocks: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    tokens: int


# Devlin et al., arXiv 1810.04805, section 3 and the published uncased vocabulary.
BERT_LARGE = Size(24, 1024, 16, 4096, 30522, 512)
# Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2, second row.
GPT2_MEDIUM = Size(24, 1024, 16, 4096, 50257, 1024)
# Touvron et al., arXiv 2302.13971: RMS norms, SwiGLU of 2/3 x 4 x width rounded up to 256, 32,000
# tokens, nothing tied. Theirs begin at 32 blocks of 4,096; this one has GPT-2 medium's size.
LLAMA_24 = Size(24, 1024, 16, 2816, 32000, 2048)


class Attention(nn.Module):
    """Self-attention with projections of their own for queries, keys and values."""

    def __init__(self, size: Size, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (
            nn.Linear(size.width, size.width, bias=bias) for _ in range(4)
        )
        self.heads, self.causal = size.heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attended ``x``."""
        mixed = attend((self.query(x), self.key(x), self.value(x)), self.heads, self.causal)
        out: torch.Tensor = self.output(mixed)
        return out


class FusedAttention(nn.Module):
    """GPT-2's: one projection for queries, keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.output = nn.Linear(size.width, size.width)
        self.heads = size.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attended ``x``."""
        out: torch.Tensor = self.output(attend(self.qkv(x).chunk(3, -1), self.heads, True))
        return out


def attend(qkv: tuple[torch.Tensor, ...], heads: int, causal: bool) -> torch.Tensor:
    """Scaled dot-product attention of (batch, tokens, width) queries, keys and values."""
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2) for x in qkv)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


class BertBlock(nn.Module):
    """Norms after each sum."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size, bias=True, causal=False)
        self.attention_norm = nn.LayerNorm(size.width)
        self.up, self.down = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)
        self.norm = nn.LayerNorm(size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        x = self.attention_norm(x + self.attention(x))
        out: torch.Tensor = self.norm(x + self.down(functional.gelu(self.up(x))))
        return out


class BertLarge(nn.Module):
    """BERT-large's encoder with its pooler, as it is fine-tuned."""

    def __init__(self) -> None:
        super().__init__()
        size = BERT_LARGE
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        self.kinds = nn.Embedding(2, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.blocks = nn.Sequential(*(BertBlock(size) for _ in range(size.blocks)))
        self.pooler = nn.Linear(size.width, size.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The pooled first token of each sequence."""
        place = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.words(tokens) + self.positions(place) + self.kinds(torch.zeros_like(tokens))
        pooled: torch.Tensor = self.pooler(self.blocks(self.norm(x))[:, 0])
        return pooled


class Gpt2Block(nn.Module):
    """Norms before attention and feed-forward layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = FusedAttention(size)
        self.norm = nn.LayerNorm(size.width)
        self.up, self.down = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Gpt2Medium(nn.Module):
    """GPT-2 medium: the embedding's weight is the output layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        size = GPT2_MEDIUM
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.Sequential(*(Gpt2Block(size) for _ in range(size.blocks)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each next token."""
        place = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.blocks(self.words(tokens) + self.positions(place))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class LlamaBlock(nn.Module):
    """RMS norms, no biases, and a gated feed-forward layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size, bias=False, causal=True)
        self.norm = nn.RMSNorm(size.width)
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output; rotary positions have neither parameters nor FLOPs worth counting."""
        x = x + self.attention(self.attention_norm(x))
        inner = self.norm(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return out


class Llama24(nn.Module):
    """A Llama-style decoder of 24 blocks."""

    def __init__(self) -> None:
        super().__init__()
        size = LLAMA_24
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.Sequential(*(LlamaBlock(size) for _ in range(size.blocks)))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each next token."""
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.words(tokens))))
        return logits
