"""The names of the shapes, for who has no torch."""

from __future__ import annotations

SHAPE_NAMES = ("vgg16", "resnet50", "bert-large", "gpt2-medium", "llama-24")
