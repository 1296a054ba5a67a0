"""Which backend carries the lanes, and whether it can carry this model's gradients."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist
from torch.nn import Module

from tlsched.bands import Band
from tlsched.errors import ConfigError, ModelRefused
from tlsched.shim.nccl import Nccl
from tlsched.shim.preflight import wire
from tlsched.shim.sparse import sparse_parameters
from tlsched.shim.transport import GLOO, Transport

BACKENDS = ("gloo", "nccl", "ps")


def choose_backend(
    model: Module, backend: str | None, lane_count: int, bands: Sequence[Band]
) -> Transport:
    """The ranks' transport for ``backend``; None goes by where ``model``'s parameters live.

    ``bands`` are the lanes' marks, empty when they carry none. Raises ConfigError for a backend
    that is unknown or missing here, and ModelRefused naming what it cannot carry.
    """
    if backend is None:
        backend = "nccl" if any(p.device.type == "cuda" for p in model.parameters()) else "gloo"
    if backend not in BACKENDS:
        raise ConfigError(
            f"there is no backend {backend!r} for lanes", hint=f"use one of {', '.join(BACKENDS)}"
        )
    if backend in ("gloo", "ps"):
        return GLOO  # with servers, for what is no gradient
    if not dist.is_nccl_available():
        raise ConfigError(
            'backend="nccl" needs a torch that is built with NCCL, and this one is not',
            hint='install a CUDA build of torch, or use backend="gloo"',
        )
    refuse_for_nccl(model)
    return Nccl(
        next(model.parameters()).device,
        bands,
        os.environ,
        lane_count=lane_count,
        over=wire(os.environ),
        group_class=dist.ProcessGroupNCCL,
    )


def refuse_for_nccl(model: Module) -> None:
    """Raise ModelRefused naming the first tensor of ``model`` that NCCL cannot carry."""
    first = next(model.parameters()).device
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cuda":
            raise ModelRefused(
                f"{name} is on {tensor.device}, and NCCL carries tensors of CUDA devices only",
                hint='move the whole model to a GPU before the context, or use backend="gloo"',
            )
        if tensor.device != first:
            raise ModelRefused(
                f"{name} is on {tensor.device} and other tensors are on {first}",
                hint="keep one GPU a process on the nccl backend",
            )
    for name in sparse_parameters(model).values():
        raise ModelRefused(
            f"{name} asks for sparse gradients, which NCCL does not sum",
            hint='use nn.Embedding(sparse=False), or backend="gloo"',
        )
