"""Lanes on NCCL: communicators whose options carry the lane's DSCP.

NCCL sends by itself, past the kernel's sockets where it can. Over RoCE a communicator's traffic
class becomes the TOS byte of its packets (``ncclConfig_t.trafficClass``, NCCL 2.26 and newer, NCCL
user guide, "Quality of Service"); over TCP NCCL ignores it, and the sockets are marked as gloo's.
Not run on hardware by its authors: see docs/nccl.md for what that means.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tlsched.bands import Band
from tlsched.shim.agreement import Agreement
from tlsched.shim.preflight import Wire, preflight

if TYPE_CHECKING:
    from tlsched.shim.lanes import Lane


class Nccl:
    """Lanes of NCCL communicators on ``device``; a :class:`~tlsched.shim.transport.Transport`.

    ``bands[i]`` is lane *i*'s, empty when lanes carry no marks. ``group_class`` is torch's
    ProcessGroupNCCL, which builds without NCCL lack.
    """

    name = "nccl"
    one_order = True
    one_socket_a_peer = False

    def __init__(
        self,
        device: torch.device,
        bands: Sequence[Band],
        environ: Mapping[str, str],
        *,
        lane_count: int,
        over: Wire,
        group_class: Any,
    ) -> None:
        self.facts: Sequence[str] = (f"NCCL over {over}",)
        self._device = device
        self._bands = bands
        self._over = over
        self._class = group_class
        self._findings = preflight(environ, over, lane_count)
        self._takes_classes = hasattr(group_class.Options().config, "traffic_class")
        self._open: list[Any] = []

    def fds_a_lane(self, size: int) -> int:
        """Unknown: NCCL's sockets depend on its topology."""
        return 0

    def make(self, store: Store, rank: int, size: int, timeout_s: float, lane: int) -> Any:
        """A communicator that is connected: its first collective is done.

        All ranks make their lanes in one order here, so that none is made in the middle of
        training.
        """
        options = self._class.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options.group_name = f"tlsched lane {lane}"
        if self._bands and self._takes_classes and self._over in (Wire.ROCE, Wire.PLUGIN):
            options.config.traffic_class = self._bands[lane].tos
        group = self._class(store, rank, size, options)
        self._open.append(group)
        try:
            one = torch.ones(1, device=self._device)
            group.allreduce([one], dist.AllreduceOptions()).wait()
            one.item()  # wait() orders the stream only; this waits for it
        except BaseException:
            self.abort(group)
            raise
        return group

    def running(self, work: dist.Work) -> OnStream:
        """See :class:`OnStream`."""
        return OnStream(work)

    def abort(self, group: Any) -> None:
        """Abort all communicators together: one at a time they can wait for each other."""
        groups, self._open = self._open, []
        if not groups:
            return
        groups[0]._group_start()
        for one in groups:
            one.abort()
        groups[0]._group_end()

    def leave(self, group: Any) -> None:
        """Destroy the communicator; without that its destructor warns and its threads stay."""
        if group in self._open:
            self._open.remove(group)
            group.shutdown()

    def why_unmarked(self, agreement: Agreement, lanes: Sequence[Lane]) -> str | None:
        """See :class:`~tlsched.shim.transport.Transport`."""
        if self._over is Wire.INFINIBAND:
            return "on InfiniBand a traffic class is a service level, and a DSCP is none"
        if self._over is Wire.TCP:
            counts = agreement.gather("lanes' sockets", sum(len(lane.marked) for lane in lanes))
            return None if any(counts) else "NCCL opened no TCP connection between ranks"
        if not self._takes_classes:
            return "this build of torch cannot set config.traffic_class (it needs NCCL 2.26)"
        return None

    def findings(self) -> Sequence[str]:
        """See :class:`~tlsched.shim.transport.Transport`."""
        return [str(finding) for finding in self._findings]


class OnStream:
    """A collective of NCCL's, awaited by the stream and not by this thread.

    What is launched on the current stream after :meth:`wait` runs when the average is there. No
    limit is passed on: NCCL's watchdog ends what takes longer than the group's timeout, and where
    TORCH_NCCL_BLOCKING_WAIT is set a limit that runs out would count as its failure.
    """

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, limit: datetime.timedelta | None = None) -> bool:
        """Order the current stream after the collective. ``limit`` is not used."""
        return self._work.wait()

    def is_completed(self) -> bool:
        """True: what :meth:`wait` raises is a failure and never the end of a time slice."""
        return True

    def get_future(self) -> Any:
        """c10d's Future of it, complete as soon as the collective is queued."""
        return self._work.get_future()
