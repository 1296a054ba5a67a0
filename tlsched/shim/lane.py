"""AnyLane: what carries gradients, as those who send over it see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from tlsched.errors import CommunicationError
from tlsched.shim.reduction import Running
from tlsched.shim.roster import Roster

if TYPE_CHECKING:
    from tlsched.shim.lanes import Lane


class AnyLane(Protocol):
    """A lane: of a process group's (:mod:`tlsched.shim.lanes`) or to servers (tlsched.shim.ps).

    ``one_order`` tells that all ranks must start the sums of all lanes in one order, and not only
    those of each lane.
    """

    @property
    def roster(self) -> Roster:
        """The ranks that it joins."""

    @property
    def timeout_s(self) -> float:
        """How long a wait for others may take."""

    @property
    def control(self) -> Lane:
        """Where all travels that is no bucket: this lane itself, if it can carry that."""

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """The IP addresses, own and peer's, of its marked connections."""

    @property
    def one_order(self) -> bool:
        """See the class."""

    def all_reduce(self, flat: torch.Tensor) -> Running:
        """Start summing the contiguous tensor ``flat`` over all ranks, in place."""

    def start_s(self, device: torch.device) -> float:
        """Seconds that a sum of next to nothing takes: the least of several."""

    def failure(self, what: str, error: RuntimeError) -> CommunicationError:
        """The error that says what failed and through whom, where the lane's own is ``error``."""

    def broken(self) -> str | None:
        """Why nothing can arrive any more, if nobody has said so yet."""

    def close(self, *, abort: bool) -> None:
        """Leave; with ``abort`` so that nothing waits, here or elsewhere."""
