"""Exchange: one sum under way, for whoever waits for it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import torch

from tlsched.shim.reduction import SLICE_S
from tlsched.shim.roster import Roster


class Exchange:
    """The sum of ``tensor``, in place; what :class:`~tlsched.shim.reduction.Reduction` is for gloo.

    ``left`` counts the segments that have not come back, by server.
    """

    __slots__ = (
        "_done",
        "_failure",
        "_future",
        "_lock",
        "_roster",
        "_started_s",
        "_tensor",
        "_told",
        "left",
        "memory",
    )

    def __init__(self, tensor: torch.Tensor, roster: Roster | None) -> None:
        self._tensor: torch.Tensor | None = tensor
        # By address, so that no view of it counts as a user of the gradient's memory; the tensor
        # itself is kept until everything is there.
        length = tensor.numel() * tensor.element_size()
        whole = (ctypes.c_char * length).from_address(tensor.data_ptr())
        self.memory = memoryview(whole).cast("B") if length else memoryview(b"")
        self.left: dict[int, int] = {}
        self._roster = roster
        self._failure: str | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._future: torch.futures.Future[object] | None = None
        self._started_s = time.monotonic()
        self._told = False

    def arrived(self, server: int) -> bool:
        """A segment came back from ``server``; True when it was the last of all."""
        self.left[server] -= 1
        if not self.left[server]:
            del self.left[server]
        return not self.left

    def end(self, failure: str | None = None) -> None:
        """It is complete, or nothing more comes."""
        with self._lock:
            if self._done.is_set():
                return
            self._failure, self._tensor = failure, None
            self._done.set()
            future = self._future
        if future is not None:
            _complete(future, failure)

    def wait(self, timeout_s: float) -> None:
        """Return when it is done. Raises RuntimeError saying why it failed, again at each call.

        After half of the time it leaves a note for the others (see :mod:`tlsched.shim.roster`).
        """
        end_s = time.monotonic() + timeout_s
        while not self._done.wait(min(SLICE_S, max(0.0, end_s - time.monotonic()))):
            now_s = time.monotonic()
            if now_s >= end_s:
                raise RuntimeError(f"Timed out waiting {timeout_s:g} s")
            late = now_s > self._started_s + timeout_s / 2
            if late and not self._told and self._roster is not None:
                self._told = True
                self._roster.still_waiting()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long; True when it succeeded."""
        return self._done.wait(seconds) and self._failure is None

    def get_future(self) -> torch.futures.Future[object]:
        """Completes when this does."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
            future, done = self._future, self._done.is_set()
        if done:
            _complete(future, self._failure)
        return future


def _complete(future: torch.futures.Future[object], failure: str | None) -> None:
    with contextlib.suppress(RuntimeError):  # two threads may complete it at once
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(RuntimeError(failure))
