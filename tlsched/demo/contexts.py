"""The contexts in which a policy trains: torch's own two, and tlsched's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import tlsched
from tlsched.demo.job import Job
from tlsched.planning.policies import PolicySettings, Window

Timeline = Callable[[], list[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Context:
    """What to call as the model, the optimizer to step, and one iteration's buckets when asked."""

    forward: nn.Module
    optimizer: Optimizer
    timeline: Timeline
    run: tlsched.Run | None = None


@contextmanager
def around(
    job: Job, net: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]
) -> Iterator[Context]:
    """The context in which ``job.policy`` trains ``net``."""
    if job.policy == "ddp":
        from tlsched.demo.ddp_trace import DdpTrace

        wrapped = DistributedDataParallel(
            net, broadcast_buffers=False, bucket_cap_mb=job.bucket_cap_mb
        )
        trace = DdpTrace(wrapped).timeline if job.trace else list
        yield Context(wrapped, make_optimizer(net), trace)
    elif job.policy == "fsdp2":
        _shard(net)
        yield Context(net, make_optimizer(net), list)
    else:
        optimizer = make_optimizer(net)
        window = None if job.window is None else Window(*job.window)
        with tlsched.schedule(
            net,
            optimizer,
            policy=job.policy,
            settings=PolicySettings(window=window),
            broadcast_buffers=False,
            trace=job.trace,
            lanes=job.lanes,
            backend="ps" if job.servers else "gloo",
            servers=job.servers or None,
        ) as run:
            yield Context(net, optimizer, lambda: _timeline(run), run)


def _shard(net: nn.Module) -> None:
    """FSDP2 as its documentation has it: each layer, then the whole (torch's fully_shard)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _timeline(run: tlsched.Run) -> list[dict[str, float]]:
    """One settled iteration: its buckets' times, needed in the iteration after it."""
    assert run.trace is not None
    made, used = list(run.trace.iterations)[-3:-1]
    sizes = {row["bucket"]: row["bytes"] for row in run.report()}
    return [
        {
            "bytes": sizes[bucket],
            "ready_s": made.ready_s[bucket] - made.start_s,
            "sent_s": made.sent_s[bucket] - made.start_s,
            "needed_s": used.needed_s[bucket] - made.start_s,
        }
        for bucket in sorted(made.ready_s)
    ]
