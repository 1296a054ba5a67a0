"""A lane to parameter servers, and what the lanes of one context share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tlsched.errors import CommunicationError, ModelRefused
from tlsched.shim.lanes import Lane, least_start_s
from tlsched.shim.ps.adding import NAMES
from tlsched.shim.ps.client import Client
from tlsched.shim.ps.exchange import Exchange
from tlsched.shim.ps.starting import Child
from tlsched.shim.roster import Roster

_CODES = {getattr(torch, name): code for code, name in enumerate(NAMES)}


def code_of(dtype: torch.dtype) -> int | None:
    """What ``dtype`` is called on the wire; None when servers cannot add it."""
    return _CODES.get(dtype.to_real() if dtype.is_complex else dtype)


@dataclass(slots=True)
class Session:
    """What all lanes of a context share: connections to servers, and a process group's lane.

    ``control`` carries what is no gradient: parameters, buffers, sparse gradients. ``child`` is the
    server that this process started, if it did. ``hold`` makes servers keep sums back until they
    have the whole of what was pushed at once.
    """

    control: Lane
    client: Client
    child: Child | None
    hold: bool
    closed: bool = False

    def close(self, *, abort: bool) -> None:
        """Leave servers and ranks; what was started here ends."""
        if self.closed:
            return
        self.closed = True
        try:
            self.client.close(abort=abort)
        finally:
            try:
                self.control.close(abort=abort)
            finally:
                if self.child is not None:
                    self.child.end(abort=abort)


@dataclass(slots=True)
class ServedLane:
    """A lane: its sums go through servers, the rest over a process group."""

    index: int
    session: Session
    one_order: bool = False

    @property
    def control(self) -> Lane:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return self.session.control

    @property
    def roster(self) -> Roster:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return self.session.control.roster

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return self.session.client.pairs

    @property
    def timeout_s(self) -> float:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return self.session.control.timeout_s

    def all_reduce(self, flat: torch.Tensor) -> Exchange:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        code = code_of(flat.dtype)
        if code is None or flat.device.type != "cpu" or not flat.is_contiguous():
            raise ModelRefused(
                f"a {flat.dtype} on {flat.device} cannot be summed by servers",
                hint='use backend="gloo"',
            )
        self.roster.started[self.index] += 1
        exchange = Exchange(flat, self.roster)
        if flat.numel():
            size = flat.element_size()
            self.session.client.reduce(self.index, exchange, code, size, self.session.hold)
        else:
            exchange.end()
        return exchange

    def start_s(self, device: torch.device) -> float:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return least_start_s(self, self.index, device)

    def failure(self, what: str, error: RuntimeError) -> CommunicationError:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        client, roster = self.session.client, self.roster
        hint = "see that rank's or server's own error; every rank must run as many backwards"
        trouble = client.trouble
        if client.failure is None:
            who = roster.who_is_silent(self.index, self.timeout_s)
            silent = client.silent(self.index)
            if roster.blamed is None and silent:
                who = f"{' and '.join(silent)} did not answer within {self.timeout_s:g} s"
        elif trouble is None or trouble.rank is None:
            who = client.failure
        elif trouble.gone:
            who = roster.who_broke(trouble.rank, {trouble.rank})
        else:
            roster.blamed = trouble.rank
            who = f"{roster.name(trouble.rank)} {trouble.text}"
        return CommunicationError(f"{what} failed: {who}", hint=hint)

    def broken(self) -> str | None:
        """See :class:`~tlsched.shim.lane.AnyLane`."""
        return self.session.client.failure

    def close(self, *, abort: bool) -> None:
        """See :class:`~tlsched.shim.lane.AnyLane`. The first lane that is closed closes all."""
        self.session.close(abort=abort)
