"""Buffers for segments, used again and again: nothing is allocated while sums go round."""

from __future__ import annotations

from typing import Any

import numpy as np

from tlsched.shim.ps.cutting import SEGMENT_BYTES


class Buffer:
    """Room for one segment, as bytes; ``users`` counts who still sends from it."""

    __slots__ = ("bytes", "users", "view")

    def __init__(self) -> None:
        # Pages are taken only when they are written: a small segment costs what it needs.
        self.bytes: np.ndarray[Any, Any] = np.empty(SEGMENT_BYTES, np.uint8)
        self.view = memoryview(self.bytes)  # type: ignore[arg-type]  # a Buffer, from numpy 2.x's stubs on
        self.users = 0


class Pool:
    """Buffers that nobody uses just now; ``made`` counts all there are."""

    def __init__(self) -> None:
        self.made = 0
        self._free: list[Buffer] = []

    def take(self) -> Buffer:
        """One that is free, the last that was used first: it is in the processor's cache."""
        if self._free:
            return self._free.pop()
        self.made += 1
        return Buffer()

    def give(self, buffer: Buffer) -> None:
        """It is free again."""
        self._free.append(buffer)
