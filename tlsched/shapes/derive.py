"""A profile without a GPU: from a model's layers and how fast its FLOPs are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tlsched.planning.profile import BucketProfile, Profile
from tlsched.shapes.walk import Layer, walk

# Backward computes two products for each one of forward: the gradients of a layer's weight and
# of its input.
BACKWARD_OF_FORWARD = 2.0


def profile_from_module(model: nn.Module, inputs: Sequence[Any], flops_per_s: float) -> Profile:
    """The profile of ``model`` called with ``inputs`` (both on the meta device) at a FLOP rate.

    ``flops_per_s`` is what the device reaches, not what its data sheet says. One bucket for each
    module that reads parameters. Raises ConfigError when the model cannot run there.
    """
    layers = walk(model, inputs)
    return profile_of_layers(layers, compute_s=training_flops(layers) / flops_per_s)


def training_flops(layers: Sequence[Layer]) -> float:
    """FLOPs of a forward and a backward."""
    return sum(layer.flops for layer in layers) * (1 + BACKWARD_OF_FORWARD)


def profile_of_layers(layers: Sequence[Layer], *, compute_s: float, scale: float = 1.0) -> Profile:
    """The profile of ``layers`` when an iteration computes ``compute_s``, shared out by FLOPs.

    ``scale`` multiplies every layer's number of parameters.
    """
    forward_s = compute_s / (1 + BACKWARD_OF_FORWARD)
    backward_s = compute_s - forward_s
    total = sum(layer.flops for layer in layers)
    before = 0.0
    buckets = []
    for layer in layers:
        # Whatever is computed after the beginning of this layer's forward comes before the end of
        # its backward.
        share = min(1.0, before / total) if total else 0.0
        if layer.tensors:
            names = tuple(tensor.name for tensor in layer.tensors)
            size = layer.scaled(scale) * layer.bytes_an_element
            ready_s, needed_s = backward_s * (1 - share), forward_s * share
            buckets.append(BucketProfile(names, size, ready_s, needed_s, layer.kind))
        before += layer.flops
    return Profile(tuple(buckets), forward_s, backward_s)
