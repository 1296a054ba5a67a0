"""Replayed models: real parameters and real gradients, with the compute slept instead of done.

A replayed model is an ordinary nn.Module, so that DistributedDataParallel and tlsched train it
through their front doors, and a machine without GPUs shows what its network would have to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tlsched.planning.profile import Profile
from tlsched.shapes.catalog import layers_of
from tlsched.shapes.derive import BACKWARD_OF_FORWARD, profile_of_layers
from tlsched.shapes.walk import Layer

GRADIENT_BYTES = 4  # of an element: replayed parameters are float32
# More than a busy processor's queue: whoever is later stood still, and so did what it stands for.
MOST_LATE_S = 0.05
WAITED_S = 1e-3  # between two layers: then the host was not only late, but waited for gradients


def replayed(name: str, *, compute_s: float, scale: float = 1.0) -> ReplayedModel:
    """The shape called ``name`` (see :mod:`tlsched.shapes.names`) as a replayed model.

    An iteration sleeps ``compute_s``; ``scale`` multiplies every layer's number of parameters.
    Raises ConfigError with the names there are.
    """
    return ReplayedModel(layers_of(name), compute_s=compute_s, scale=scale)


def gradient_bytes(name: str, scale: float = 1.0) -> int:
    """Bytes of all gradients of :func:`replayed`."""
    return GRADIENT_BYTES * sum(layer.scaled(scale) for layer in layers_of(name) if layer.tensors)


def replayed_profile(name: str, *, compute_s: float, scale: float = 1.0) -> Profile:
    """The profile of :func:`replayed`, its parameters by their names there: what to simulate."""
    profile = profile_of_layers(layers_of(name), compute_s=compute_s, scale=scale)
    read = [layer for layer in layers_of(name) if layer.tensors]
    buckets = tuple(
        replace(bucket, names=(f"{_module_name(layer)}.weight",))
        for bucket, layer in zip(profile.buckets, read, strict=True)
    )
    return replace(profile, buckets=buckets)


def _module_name(layer: Layer) -> str:
    return layer.name.replace(".", "_")  # a module's own name may hold no dot


class ReplayedModel(nn.Module):
    """``layers`` in a row; one iteration sleeps ``compute_s``, two thirds of it in backward.

    A layer's parameters are one tensor of ``scale`` times their number, which a layer that reads
    them again (tied weights) shares. Time is shared out by FLOPs, backward costing twice the
    forward, as is usual for GPUs.
    """

    def __init__(self, layers: Sequence[Layer], *, compute_s: float, scale: float = 1.0) -> None:
        super().__init__()
        total = sum(layer.flops for layer in layers) * (1 + BACKWARD_OF_FORWARD)
        clock = _Clock()
        owners: dict[str, nn.Parameter] = {}
        for layer in layers:
            forward_s = compute_s * layer.flops / total
            times_s = (forward_s, BACKWARD_OF_FORWARD * forward_s)
            if layer.tensors:
                weight = nn.Parameter(torch.zeros(layer.scaled(scale)))
                owners |= dict.fromkeys((tensor.name for tensor in layer.tensors), weight)
            else:
                weight = owners[layer.again[0]]
            replay = ReplayedLayer(weight, *times_s, clock)
            self.add_module(_module_name(layer), replay)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass ``x`` (any shape) through, sleeping."""
        for layer in self.children():
            x = layer(x)
        return x


class _Clock:
    """The accelerator's time: what it computes takes as long as it should, however busy the host.

    A sleep ends some 60 us late (timer slack, see prctl(2)) and later on a busy processor, and a
    model may have 400 a step: what one takes too long, the next is short. Backward never waits for
    the network, so there a layer's end counts from the beginning of the whole backward: gradients
    are copied while the accelerator goes on. In forward a host runs ahead of the accelerator, so
    what it does in less than WAITED_S between two layers costs nothing; what takes longer is a wait
    for gradients, which the accelerator shares. The same holds under every policy.
    """

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._late_s = 0.0
        self._backward_end_s: float | None = None

    def forward(self, seconds: float) -> None:
        """Compute a layer's forward from now on."""
        self._backward_end_s = None
        self._sleep_until(self._free_s() + seconds)

    def backward(self, seconds: float) -> None:
        """Compute a layer's backward, after those that were computed since the last forward."""
        if self._backward_end_s is None:
            self._backward_end_s = self._free_s()
        self._backward_end_s += seconds
        self._sleep_until(self._backward_end_s)

    def _free_s(self) -> float:
        """When the accelerator can begin: at the last layer's end, unless the host waited since."""
        now_s = time.perf_counter()
        return now_s if now_s - self._ended_s > WAITED_S else self._ended_s - self._late_s

    def _sleep_until(self, end_s: float) -> None:
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self._ended_s = time.perf_counter()
        self._late_s = min(MOST_LATE_S, max(0.0, self._ended_s - end_s))


class ReplayedLayer(nn.Module):
    """Reads ``weight``; a forward of ``forward_s`` and a backward of ``backward_s`` seconds."""

    def __init__(
        self, weight: nn.Parameter, forward_s: float, backward_s: float, clock: _Clock
    ) -> None:
        super().__init__()
        self.weight = weight
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` plus the first weight, so that the result depends on what was learned."""
        replayed = _Replay.apply(x, self.weight, self)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert isinstance(replayed, torch.Tensor)
        return replayed


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: ReplayedLayer
    ) -> torch.Tensor:
        layer.clock.forward(layer.forward_s)
        ctx.layer = layer
        ctx.weight_like = weight
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        # A constant gradient: producing it costs one pass over memory, as little as is possible.
        gradient = torch.full_like(ctx.weight_like, float(grad.mean()))
        ctx.layer.clock.backward(ctx.layer.backward_s)
        return grad, gradient, None


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
                    _own(parameter)[:1].add_(_own(parameter.grad)[:1], alpha=-group["lr"])


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; the first element is rank 0's."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
