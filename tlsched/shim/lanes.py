"""Lanes: process groups of their own, whose sockets all carry one priority and one DSCP.

One TCP connection cannot reorder its bytes, and gloo keeps one a pair of ranks and group; so what
shall overtake needs a group of its own. Lanes are independent of each other: only inside a lane
must all ranks issue their collectives in the same order.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tlsched.bands import Band
from tlsched.errors import CommunicationError
from tlsched.shim import sockets

# What one gloo group costs a process besides its N-1 sockets: a listener and two epoll/event files.
FDS_BESIDE_PEERS = 4


@dataclass(slots=True)
class Lane:
    """A gloo process group and its connections, by rank; ``band`` is None when it is not marked."""

    index: int
    group: dist.ProcessGroup
    connections: dict[int, sockets.Connection]
    band: Band | None = None
    _options: dist.AllreduceOptions = field(default_factory=dist.AllreduceOptions)

    def all_reduce(self, flat: torch.Tensor) -> dist.Work:
        """Start summing the contiguous tensor ``flat`` over all ranks, in place."""
        # The group's own method: dist.all_reduce adds 20 us of argument checks to every bucket.
        return self.group.allreduce([flat], self._options)

    def rank_of(self, text: str) -> int | None:
        """The rank whose address appears in ``text``, an error message of gloo's."""
        for rank, connection in self.connections.items():
            host, port = connection.peer
            if f"{host}]:{port}" in text or f"{host}:{port}" in text:
                return rank
        return None

    def close(self, *, abort: bool) -> None:
        """Leave the group; with ``abort`` cut its connections first, so that nothing waits."""
        if abort:
            for connection in self.connections.values():
                sockets.cut(connection)
        dist.destroy_process_group(self.group)


def open_lanes(ranks: Sequence[int], count: int, timeout_s: float) -> list[Lane]:
    """Make ``count`` lanes over the global ``ranks``; every one of these ranks must call this."""
    lanes: list[Lane] = []
    try:
        for index in range(count):
            lanes.append(_open_lane(ranks, index, timeout_s))  # noqa: PERF401  # kept for clean-up
    except BaseException:
        for lane in lanes:
            lane.close(abort=True)
        raise
    return lanes


def mark_lanes(lanes: Sequence[Lane], bands: Sequence[Band]) -> str | None:
    """Mark lane *i*'s sockets with ``bands[i]`` on all ranks, or on none.

    Returns None, or why the lanes stay unmarked (the same answer on every rank).
    """
    control = lanes[0].group
    size, rank = control.size(), control.rank()
    reasons = []
    if any(len(lane.connections) != size - 1 for lane in lanes):
        reasons.append(f"rank {rank} cannot tell its lanes' sockets from others (is there NAT?)")
    try:
        if not reasons:
            for lane, band in zip(lanes, bands, strict=True):
                for connection in lane.connections.values():
                    sockets.mark(connection, band)
    except OSError as error:
        reasons.append(f"rank {rank} may not mark its sockets ({error.strerror})")
    everyone: list[list[str] | None] = [None] * size
    dist.all_gather_object(everyone, reasons, group=control)
    refused = [reason for of_rank in everyone if of_rank for reason in of_rank]
    if refused:
        return refused[0]
    for lane, band in zip(lanes, bands, strict=True):
        lane.band = band
    return None


def _open_lane(ranks: Sequence[int], index: int, timeout_s: float) -> Lane:
    def make() -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            list(ranks),
            backend="gloo",
            timeout=datetime.timedelta(seconds=timeout_s),
            use_local_synchronization=True,
            group_desc=f"tlsched lane {index}",
        )
        return group

    try:
        group, connections = sockets.sockets_made_by(make)
        pairs: list[list[tuple[sockets.Address, sockets.Address]]] = [[] for _ in ranks]
        dist.all_gather_object(pairs, [(c.local, c.peer) for c in connections], group=group)
    except (OSError, RuntimeError) as error:
        needed = len(ranks) - 1 + FDS_BESIDE_PEERS
        raise CommunicationError(
            f"lane {index} could not be opened ({_first_line(error)})",
            hint=f"each lane needs {needed} file descriptors (see `ulimit -n`) and a reachable "
            "interface (see GLOO_SOCKET_IFNAME)",
        ) from error
    return Lane(index, group, sockets.mirrored(connections, pairs, group.rank()))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
