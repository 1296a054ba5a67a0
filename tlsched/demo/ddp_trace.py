"""When DistributedDataParallel's buckets were ready, sent and needed."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from tlsched.shim.trace import Iteration


class DdpTrace:
    """Watches ``wrapped`` through a communication hook, which averages as DDP itself would."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._iterations = [Iteration(time.perf_counter())]
        self._bucket_of: dict[Parameter, int] = {}
        self._bytes: dict[int, int] = {}
        # torch wants this parameter unannotated, or annotated with a type that its stubs lack.
        wrapped.register_comm_hook(None, lambda _state, bucket: self._average(bucket))
        wrapped.register_forward_pre_hook(self._start, prepend=True)
        for module in wrapped.modules():
            if module is not wrapped:
                module.register_forward_pre_hook(self._needed)

    def timeline(self) -> list[dict[str, float]]:
        """The last iteration but one, in the order in which buckets were needed."""
        made, used = self._iterations[-2:]
        rows = [
            {
                "bytes": float(self._bytes[bucket]),
                "ready_s": made.ready_s[bucket] - made.start_s,
                "sent_s": made.sent_s[bucket] - made.start_s,
                "needed_s": used.needed_s[bucket] - made.start_s,
            }
            for bucket in made.ready_s
        ]
        return sorted(rows, key=lambda row: row["needed_s"])

    def _start(self, _module: Module, _arguments: Any) -> None:
        self._iterations.append(Iteration(time.perf_counter()))

    def _needed(self, module: Module, _arguments: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter in self._bucket_of:
                bucket = self._bucket_of[parameter]
                self._iterations[-1].needed_s.setdefault(bucket, time.perf_counter())

    def _average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        iteration, index = self._iterations[-1], bucket.index()
        iteration.ready_s[index] = time.perf_counter()
        flat = bucket.buffer()
        self._bytes[index] = flat.numel() * flat.element_size()
        self._bucket_of.update(dict.fromkeys(bucket.parameters(), index))
        work = dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True)
        assert work is not None

        def sent(future: torch.futures.Future[Any]) -> torch.Tensor:
            iteration.sent_s[index] = time.perf_counter()
            result: torch.Tensor = future.value()[0]
            return result

        averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(sent)
        return averaged
