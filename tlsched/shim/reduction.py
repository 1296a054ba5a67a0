"""A running collective, awaited so that Ctrl-C is heard and nothing keeps a dead group alive."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from tlsched.shim.roster import Roster

# c10d's wait() hears no signal. So a long wait is made of short ones, between which Python runs its
# signal handlers; whoever need not wait longer than this never notices.
SLICE_S = 0.5
_SLICE = datetime.timedelta(seconds=SLICE_S)


class Running(Protocol):
    """What a bucket waits for: a :class:`Reduction`, or several pieces of one."""

    def wait(self, timeout_s: float) -> None:
        """See :class:`Reduction`."""

    def ends_within(self, seconds: float) -> bool:
        """See :class:`Reduction`."""

    def get_future(self) -> torch.futures.Future[object]:
        """See :class:`Reduction`."""


class Reduction:
    """c10d's ``work``, let go as soon as it has ended.

    A process group lives as long as a Work of it, and a traceback keeps whatever its frames hold;
    so an error that somebody stores would keep the group's threads and sockets. ``broken`` tells
    of a connection that is closed, whatever gloo says.
    """

    __slots__ = ("__weakref__", "_broken", "_failure", "_roster", "_started_s", "_told", "_work")

    def __init__(self, work: dist.Work, roster: Roster, broken: Callable[[], str | None]) -> None:
        self._work: dist.Work | None = work
        self._failure: str | None = None
        self._roster = roster
        self._broken = broken
        self._started_s = time.monotonic()
        self._told = False

    def wait(self, timeout_s: float) -> None:
        """Return when it is done. Raises RuntimeError with gloo's message, again at each call.

        After half of the time it leaves a note for the others (see :mod:`tlsched.shim.roster`).
        """
        end_s = time.monotonic() + timeout_s
        broken: str | None = None
        while self._failure is None and not self._ended():
            if broken is not None:
                self._failure = broken  # and gloo had another slice to find it
                break
            broken = self._broken()
            now_s = time.monotonic()
            if now_s > end_s:
                raise RuntimeError(f"Timed out waiting {timeout_s:g} s")
            if not self._told and now_s > self._started_s + timeout_s / 2:
                self._told = True
                self._roster.still_waiting()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long (in steps of half a second); True when it succeeded."""
        return self.ends_by(time.monotonic() + seconds) and self._failure is None

    def ends_by(self, end_s: float) -> bool:
        """Wait until a time of time.monotonic(); True when it has ended in any way."""
        while not self._ended():
            if time.monotonic() >= end_s:
                return False
        return True

    def get_future(self) -> torch.futures.Future[object]:
        """c10d's Future of it; only before :meth:`wait`."""
        assert self._work is not None
        future: torch.futures.Future[object] = self._work.get_future()
        return future

    def drop(self, failure: str) -> dist.Work | None:
        """Let go of what has not ended, return it, and fail whoever waits later."""
        work, self._work = self._work, None
        if work is not None:
            self._failure = failure
        return work

    def _ended(self) -> bool:
        """Wait one slice."""
        if self._work is None:
            return True
        try:
            try:
                self._work.wait(_SLICE)
            except RuntimeError:
                # The end of the slice and a failure are told by the same exception.
                if not self._work.is_completed():
                    return False
                self._work.wait()
        except RuntimeError as error:
            self._failure = str(error)
        self._work = None
        return True
