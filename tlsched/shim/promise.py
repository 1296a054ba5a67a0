"""A gradient that is still being averaged: whoever touches it waits for it, nobody else does.

After ``backward()`` the all-reduce is running, but user code may read or change ``p.grad``
(clipping, unscaling, logging). So ``p.grad`` holds a :class:`Promise`: a tensor without memory of
its own that settles its bucket on first use and then stands for the gradient's place in the bucket,
as the async tensors of functional collectives do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

# Reading these tells nothing of the values, so nothing needs to be waited for.
METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_cuda", "is_cpu", "is_meta",
        "is_leaf", "requires_grad", "grad_fn", "is_quantized", "is_mkldnn", "is_nested",
        "itemsize", "nbytes", "is_xpu", "is_mps", "is_sparse_csr", "output_nr", "grad",
    )
) | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.numel,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_contiguous,
    torch.Tensor.element_size, torch.Tensor.storage_offset, torch.Tensor.get_device,
    torch.Tensor.requires_grad_,  # zero_grad() calls it on every gradient
}  # fmt: skip

_ZERO = {torch.Tensor.zero_, torch.ops.aten.zero_.default}
_FOREACH_ZERO = {torch._foreach_zero_, torch.ops.aten._foreach_zero_.default}


class Settles(Protocol):
    """What stands behind a promise: a bucket."""

    def settle(self) -> None:
        """Return when the gradients are averaged and every update that was asked for is done."""

    def zero_later(self, index: int) -> bool:
        """Zero the gradient at ``index`` once it has been used; False when nothing is pending."""

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """Add ``gradient`` to the one at ``index``, on autograd's behalf."""


class Promise(torch.Tensor):
    """The gradient at ``index`` of ``owner``, whose values live in ``view`` (any strides)."""

    view_: torch.Tensor
    owner_: Settles
    index_: int

    @staticmethod
    def __new__(cls, view: torch.Tensor, owner: Settles, index: int) -> Promise:
        """Wrap ``view``."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, view.size(), strides=view.stride(), dtype=view.dtype, device=view.device
        )
        self.view_, self.owner_, self.index_ = view, owner, index
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every use from Python."""
        return _use(func, args, kwargs or {}, settle=func not in METADATA)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as a static method
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every use from C++: autograd accumulating into ``p.grad``, above all."""
        if func is torch.ops.aten.add_.Tensor and not kwargs and isinstance(args[0], Promise):
            promise, gradient = args
            if not isinstance(gradient, Promise):
                promise.owner_.accumulate(promise.index_, gradient)
                return promise
        return _use(func, args, kwargs or {}, settle=True)


class Settled:
    """Stands behind a promise whose bucket has moved on to other memory, or is no more."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    def settle(self) -> None:
        """Nothing is pending."""

    def zero_later(self, index: int) -> bool:
        """Zero it now."""
        return False

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """As any gradient."""
        self._view.add_(gradient)


def _use(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, settle: bool
) -> Any:
    if func in _ZERO and isinstance(args[0], Promise):
        if args[0].owner_.zero_later(args[0].index_):
            return args[0]
    elif func in _FOREACH_ZERO:
        args = ([g for g in args[0] if not _zeroed_later(g)], *args[1:])
        if not args[0]:
            return None

    used: dict[int, Promise] = {}

    def resolve(promise: Promise) -> torch.Tensor:
        if settle:
            promise.owner_.settle()
        used[id(promise.view_)] = promise
        return promise.view_

    result = func(*tree_map_only(Promise, resolve, args), **tree_map_only(Promise, resolve, kwargs))
    # What works in place returns its argument: `p.grad *= 2` must not put a bare view in p.grad.
    return used.get(id(result), result)


def _zeroed_later(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, Promise) and gradient.owner_.zero_later(gradient.index_)
