"""Buffers (BatchNorm's running statistics) by DistributedDataParallel's rule.

Rank 0's are sent to all before a training forward that follows a synchronised one: not after one
under no_sync() or without gradients. Evaluation sends nothing, so one rank may evaluate alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from tlsched.shim.hooks import Uncopied
from tlsched.shim.lanes import Lane


class Buffers:
    """Sends ``model``'s buffers over ``lane``; ``synchronised()``: whether no_sync() is off."""

    def __init__(self, model: Module, lane: Lane, synchronised: Callable[[], bool]) -> None:
        self._model = model
        self._lane = lane
        self._synchronised = synchronised
        self._due = True
        self._handles: list[RemovableHandle] = []
        if next(model.buffers(), None) is not None:
            self._handles = [
                model.register_forward_pre_hook(Uncopied(self._before_forward), prepend=True),
                model.register_forward_hook(Uncopied(self._after_forward)),
            ]

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _trains(self) -> bool:
        return (
            torch.is_grad_enabled()
            and any(module.training for module in self._model.modules())
            and not torch.compiler.is_compiling()
            and torch._C._current_autograd_node() is None  # a checkpoint computes it again
        )

    def _before_forward(self, _module: Module, _arguments: Any) -> None:
        if self._trains() and self._due:
            self._due = False
            self._send()

    def _after_forward(self, _module: Module, _arguments: Any, _result: Any) -> None:
        if self._trains():
            self._due = self._synchronised()

    def _send(self) -> None:
        # Looked up each time: a buffer may have been assigned anew. As bytes, so that one message
        # carries all of them, whatever their types.
        buffers = [b for b in self._model.buffers() if b.numel()]
        if not buffers:
            return
        with torch.no_grad():
            parts = [b.detach().reshape(-1).view(torch.uint8) for b in buffers]
            whole = torch.cat(parts)
            self._lane.broadcast([whole])
            if self._lane.roster.rank == 0:
                return
            sizes = [part.numel() for part in parts]
            for buffer, part in zip(buffers, torch.split(whole, sizes), strict=True):
                buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
