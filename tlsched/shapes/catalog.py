"""The five shapes: models of different kinds whose layers are published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from tlsched.errors import ConfigError
from tlsched.shapes import language, vision
from tlsched.shapes.names import SHAPE_NAMES
from tlsched.shapes.walk import Layer, Tensor, walk


@dataclass(frozen=True, slots=True)
class Shape:
    """How a model and the input for one sample are made, on the device that is current."""

    model: Callable[[], nn.Module]
    sample: Callable[[], Any]


def _image() -> torch.Tensor:
    return torch.empty(1, *vision.IMAGE_SHAPE)


def _tokens(size: language.Size) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(1, size.tokens, dtype=torch.long)


_SHAPES = {
    "vgg16": Shape(vision.VGG16, _image),
    "resnet50": Shape(vision.ResNet50, _image),
    "bert-large": Shape(language.BertLarge, _tokens(language.BERT_LARGE)),
    "gpt2-medium": Shape(language.Gpt2Medium, _tokens(language.GPT2_MEDIUM)),
    "llama-24": Shape(language.Llama24, _tokens(language.LLAMA_24)),
}
assert tuple(_SHAPES) == SHAPE_NAMES


# No model, but what a classical parameter server is worst at: pushing and pulling its one tensor
# take turns, and computing could hide both.
ONE_TENSOR = "one-tensor"
_ONE_TENSOR_PARTS = 12


def _one_tensor() -> tuple[Layer, ...]:
    """All bytes in the last layer, all computing in those before it."""
    parts = [
        Layer(f"part{number}", (Tensor(f"part{number}.weight", 1, 4, "float32"),), 1e9)
        for number in range(_ONE_TENSOR_PARTS)
    ]
    elements = 100_000_000
    whole = Tensor("whole.weight", elements, 4 * elements, "float32")
    return (*parts, Layer("whole", (whole,), 1.0))


@cache
def layers_of(name: str) -> tuple[Layer, ...]:
    """The layers of the shape called ``name``, with the FLOPs of one sample's forward.

    ONE_TENSOR is understood as well. Raises ConfigError with the names there are.
    """
    if name == ONE_TENSOR:
        return _one_tensor()
    if name not in _SHAPES:
        raise ConfigError(
            f"there is no shape {name!r}", hint=f"use one of {', '.join(SHAPE_NAMES)}"
        )
    shape = _SHAPES[name]
    with torch.device("meta"):
        return tuple(walk(shape.model(), (shape.sample(),)))
