"""A stand-in with the surface of torch's ProcessGroupNCCL, for machines without a GPU.

It records the options it is made with and the order of what is started on it, and lets a real gloo
group carry the tensors, so that real ranks can train by it. It shows what tlsched asks of NCCL and
in which order; it shows nothing of what NCCL does with that.
"""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist


class NcclByGloo:
    """See the module. ``log`` holds what was asked, in order, by all groups of this process."""

    log: ClassVar[list[tuple[str, str]]] = []

    class Options:
        """What ProcessGroupNCCL.Options has and tlsched sets."""

        def __init__(self) -> None:
            self.config = SimpleNamespace(min_ctas=1, traffic_class=None)
            self.group_name = ""
            self._timeout = datetime.timedelta()

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options = options
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._tell("made")

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        self._tell("allreduce")
        work: dist.Work = self._gloo.allreduce(tensors, options)
        return work

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        self._tell("broadcast")
        work: dist.Work = self._gloo.broadcast(tensors, options)
        return work

    def shutdown(self) -> None:
        self._tell("shutdown")
        self._gloo = None

    def abort(self) -> None:
        self._tell("abort")
        self._gloo = None

    def _group_start(self) -> None:
        self.log.append(("group start", ""))

    def _group_end(self) -> None:
        self.log.append(("group end", ""))

    def _tell(self, what: str) -> None:
        self.log.append((what, self.options.group_name))


class OldNcclByGloo(NcclByGloo):
    """The same of a torch whose NCCL knows no traffic class."""

    class Options(NcclByGloo.Options):
        def __init__(self) -> None:
            super().__init__()
            del self.config.traffic_class
