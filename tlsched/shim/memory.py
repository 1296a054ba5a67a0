"""Where a bucket's gradients lie: one flat tensor, a view of it for each parameter, and the flags.

Behind the gradients lies one flag a parameter, 1 where this rank's backward produced a gradient.
The flags are summed with the gradients, so that every rank learns at no cost which parameters were
used by somebody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch.nn import Parameter

# Gradients start at multiples of this many elements, so that vector loads are aligned.
ALIGN_ELEMENTS = 16


class Memory:
    """Zeros for the gradients of ``parameters``, which share dtype and device."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        offsets, length = _offsets([p.numel() for p in parameters])
        first = parameters[0]
        whole = torch.zeros(length + len(parameters), dtype=first.dtype, device=first.device)
        self.flat = whole
        self.views = tuple(
            _view_like(whole, offset, p) for offset, p in zip(offsets, parameters, strict=True)
        )
        self.flags = whole[length:]
        # gloo sums no complex128: a sum of complex numbers is one of their parts.
        self.wire = torch.view_as_real(whole) if whole.is_complex() else whole
        self._own_uses = storage_uses(whole)

    @property
    def shared(self) -> bool:
        """Whether somebody else keeps a view of it (``g = p.grad.detach()``)."""
        return storage_uses(self.flat) > self._own_uses


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors (and this call) hold the tensor's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def undisturbed() -> contextlib.AbstractContextManager[object]:
    """A context in which an update computes what it would have computed inside step().

    It may run in the middle of somebody's forward pass, under inference_mode() or autocast().
    """
    cuda = torch.cuda.is_available()
    if (
        not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not (cuda and torch.is_autocast_enabled("cuda"))
        and not torch._C._len_torch_dispatch_stack()
    ):
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast("cpu", enabled=False))
    if cuda:
        stack.enter_context(torch.autocast("cuda", enabled=False))
    stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
    return stack


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill its memory without gap or overlap, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned start of each block of ``sizes`` elements, and the length of them all."""
    offsets, length = [], 0
    for size in sizes:
        offsets.append(length)
        length += -(-size // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    return offsets, length


def _view_like(flat: torch.Tensor, offset: int, parameter: Parameter) -> torch.Tensor:
    """The block of ``flat`` at ``offset`` in the parameter's shape, and its strides if dense.

    Autograd keeps a gradient's layout only where it equals the parameter's (channels_last).
    """
    block = flat[offset : offset + parameter.numel()]
    if is_dense(parameter):
        return block.as_strided(parameter.size(), parameter.stride(), offset)
    return block.view(parameter.size())
