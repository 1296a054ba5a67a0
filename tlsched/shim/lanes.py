"""Lanes: process groups of their own, whose sockets all carry one priority and one DSCP.

One TCP connection cannot reorder its bytes, and gloo keeps one a pair of ranks and group; so what
shall overtake needs a group of its own. Lanes are independent of each other: only inside a lane
must all ranks issue their collectives in the same order.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tlsched.bands import Band
from tlsched.errors import CommunicationError
from tlsched.shim import sockets
from tlsched.shim.agreement import Agreement

# What one gloo group costs a process besides its N-1 sockets: a listener, epoll and event files.
FDS_BESIDE_PEERS = 4


@dataclass(slots=True)
class Lane:
    """A gloo process group and its connections, by rank; ``band`` is None when it is not marked.

    The group is made without torch's registry of groups: new_group() reuses a name after
    destroy_process_group(), and with the name the addresses that the store still holds.
    """

    index: int
    group: Any  # dist.ProcessGroupGloo, whose collectives torch's stubs lack; None once closed
    connections: dict[int, sockets.Connection]
    band: Band | None = None
    _sum: dist.AllreduceOptions = field(default_factory=dist.AllreduceOptions)
    _from_rank_0: dist.BroadcastOptions = field(default_factory=dist.BroadcastOptions)

    def all_reduce(self, flat: torch.Tensor) -> dist.Work:
        """Start summing the contiguous tensor ``flat`` over all ranks, in place."""
        work: dist.Work = self.group.allreduce([flat], self._sum)
        return work

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite ``tensors`` (any strides) with rank 0's values."""
        with torch.no_grad():
            for tensor in tensors:
                if tensor.numel():
                    whole = tensor.detach().contiguous()
                    self.group.broadcast([whole], self._from_rank_0).wait()
                    tensor.copy_(whole)

    def rank_of(self, text: str) -> int | None:
        """The rank whose address appears in ``text``, an error message of gloo's."""
        for rank, connection in self.connections.items():
            host, port = connection.peer
            if f"{host}]:{port}" in text or f"{host}:{port}" in text:
                return rank
        return None

    def close(self, *, abort: bool) -> None:
        """Leave the group; with ``abort`` cut its connections first, so that nothing waits.

        gloo's own abort() leaves running collectives waiting for their peers.
        """
        if abort:
            for connection in self.connections.values():
                sockets.cut(connection)
        self.group = None


def open_lanes(agreement: Agreement, count: int) -> list[Lane]:
    """Make ``count`` lanes over all ranks of ``agreement``."""
    lanes: list[Lane] = []
    try:
        for index in range(count):
            lanes.append(_open_lane(agreement, index))  # noqa: PERF401  # what is open is closed
    except BaseException:
        for lane in lanes:
            lane.close(abort=True)
        raise
    return lanes


def mark_lanes(agreement: Agreement, lanes: Sequence[Lane], bands: Sequence[Band]) -> str | None:
    """Mark lane *i*'s sockets with ``bands[i]`` on all ranks, or say why they stay unordered.

    Returns None, or the first rank's reason (the same answer on every rank).
    """
    reason = _why_not(agreement, lanes) or _mark(lanes, bands)
    reasons = agreement.gather("lanes' marks", reason)
    for rank, text in enumerate(reasons):
        if text is not None:
            return f"on rank {rank}, {text}"
    for lane, band in zip(lanes, bands, strict=True):
        lane.band = band
    return None


def _why_not(agreement: Agreement, lanes: Sequence[Lane]) -> str | None:
    for lane in lanes:
        if len(lane.connections) != agreement.size - 1:
            return f"lane {lane.index}'s sockets cannot be told from others (is there NAT?)"
    return None


def _mark(lanes: Sequence[Lane], bands: Sequence[Band]) -> str | None:
    try:
        for lane, band in zip(lanes, bands, strict=True):
            for connection in lane.connections.values():
                sockets.mark(connection, band)
    except OSError as error:
        return f"the kernel refuses a mark ({error.strerror})"
    return None


def _open_lane(agreement: Agreement, index: int) -> Lane:
    def make() -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(
            agreement.substore(f"lane{index}"),
            agreement.rank,
            agreement.size,
            datetime.timedelta(seconds=agreement.timeout_s),
        )

    try:
        group, connections = sockets.sockets_made_by(make)
    except (OSError, RuntimeError) as error:
        needed = agreement.size - 1 + FDS_BESIDE_PEERS
        raise CommunicationError(
            f"lane {index} could not be opened ({_first_line(error)})",
            hint=f"each lane needs {needed} file descriptors (see `ulimit -n`) and a reachable "
            "interface (see GLOO_SOCKET_IFNAME)",
        ) from error
    pairs = agreement.gather("lane's addresses", [(c.local, c.peer) for c in connections])
    return Lane(index, group, sockets.mirrored(connections, pairs, agreement.rank))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
