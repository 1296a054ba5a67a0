"""Buffers (BatchNorm's running statistics) by DistributedDataParallel's rule.

Rank 0's are sent to all before the first training forward, and before each that follows a
synchronised backward: not under no_sync(), and not before a second forward of one backward, whose
graph may still need them. Evaluation sends nothing, so one rank may evaluate alone.
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
    """Sends ``model``'s buffers over ``lane``; ``backwards()`` counts the synchronised ones."""

    def __init__(self, model: Module, lane: Lane, backwards: Callable[[], int]) -> None:
        self._model = model
        self._lane = lane
        self._backwards = backwards
        self._sent_at = -1
        self._handles: list[RemovableHandle] = []
        if next(model.buffers(), None) is not None:
            hook = Uncopied(self._before_forward)
            self._handles = [model.register_forward_pre_hook(hook, prepend=True)]

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
        backwards = self._backwards()
        if self._sent_at != backwards and self._trains():
            self._sent_at = backwards
            self._send()

    def _send(self) -> None:
        # Looked up each time: a buffer may have been assigned anew. As bytes, so that one message
        # carries all of them, whatever their types; wide types first, so that all lie aligned.
        buffers = [b for b in self._model.buffers() if b.numel()]
        buffers.sort(key=torch.Tensor.element_size, reverse=True)
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
