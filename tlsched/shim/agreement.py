"""What all ranks must agree on, checked over a lane before and after it is decided."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn import Module

from tlsched.errors import RanksDisagree

T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup) -> list[T]:
    """``value`` of every rank, by rank."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return cast("list[T]", values)


def from_rank_0(value: T, group: dist.ProcessGroup) -> T:
    """Rank 0's ``value``, on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return cast("T", box[0])


def require_same(what: str, lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise RanksDisagree naming the first of ``lines`` that differs between two ranks."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(gather(digest, group))) == 1:
        return
    everyone = gather(list(lines), group)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for number in range(max(len(first), len(theirs))):
            a = first[number] if number < len(first) else "nothing"
            b = theirs[number] if number < len(theirs) else "nothing"
            if a != b:
                raise RanksDisagree(
                    f"ranks disagree on the {what}: rank 0 has {a}, rank {rank} has {b}",
                    hint="build the same model, optimizer and settings on every rank",
                )


def model_signature(model: Module) -> list[str]:
    """One line for each parameter and buffer: name, shape, strides, dtype, if it is trained."""
    return [
        f"{name} {tuple(tensor.shape)} strides {tensor.stride()} {tensor.dtype}"
        f"{' trained' if tensor.requires_grad else ''}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with rank 0's values."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, group_src=0, group=group)
                tensor.copy_(whole)
