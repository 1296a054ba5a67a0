"""Adding one segment to another, in place, whatever its type.

numpy adds what it has types for; the two 16-bit floating types are torch's, which is imported when
the first of them arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# A dtype's place here is its code on the wire. Complex numbers travel as their parts.
NAMES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
)
ITEM_BYTES = (4, 8, 2, 2, 8, 4, 2, 1, 1)
_BY_TORCH = ("float16", "bfloat16")

Add = Callable[["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"], None]


def _with_numpy(name: str) -> Add:
    dtype = np.dtype(name)

    def add(total: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> None:
        total, part = total.view(dtype), part.view(dtype)
        np.add(total, part, out=total)

    return add


def _with_torch(name: str) -> Add:
    def add(total: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> None:
        import torch  # seconds, and hundreds of megabytes, which other types do without

        torch.set_num_threads(1)  # a segment is too small to share, and the cores are the workers'
        dtype = getattr(torch, name)
        torch.from_numpy(total).view(dtype).add_(torch.from_numpy(part).view(dtype))

    return add


_ADDS = tuple(_with_torch(n) if n in _BY_TORCH else _with_numpy(n) for n in NAMES)


def add(total: np.ndarray[Any, Any], part: np.ndarray[Any, Any], code: int) -> None:
    """``total += part``, both bytes (uint8) of the dtype ``code``."""
    _ADDS[code](total, part)
