"""schedule(): the context around an ordinary training loop.

    with tlsched.schedule(model, optimizer):
        for batch, target in loader:
            loss_of(model(batch), target).backward()
            optimizer.step()
            optimizer.zero_grad()

The first iterations run synchronously and are watched: where each parameter is first read and in
which order gradients come. From that a plan is made, rank 0's is taken by all, and from then on
step() returns at once and each module's forward waits for its own parameters only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from tlsched.bands import DEFAULT_DSCPS, LANE_COUNT, check_lanes, lane_bands
from tlsched.errors import ConfigError
from tlsched.planning.plan import Plan
from tlsched.planning.policies import PolicySettings, in_one_order, make_policy, traits_of
from tlsched.shim import membership
from tlsched.shim.backends import choose_backend
from tlsched.shim.ps.choosing import choose_servers
from tlsched.shim.run import Run
from tlsched.shim.separable import refuse_unsuitable

# The policies that use several lanes for buckets.
SPREADING = ("kernel", "lanes")


def schedule(
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str = "kernel",
    settings: PolicySettings | None = None,
    process_group: dist.ProcessGroup | None = None,
    dscps: Sequence[int] = DEFAULT_DSCPS,
    timeout_s: float = 300.0,
    broadcast_buffers: bool = True,
    strict: bool = False,
    trace: bool = False,
    backend: str | None = None,
    lanes: Sequence[int] | None = None,
    servers: int | Sequence[str] | None = None,
) -> Run:
    """Train ``model`` data-parallel over ``process_group`` (default: all ranks).

    Use the result as a context manager around the training loop. The arguments:

    - ``policy``: ``kernel`` (default), ``lanes`` (the same, unmarked), ``fifo``, ``sync``,
      ``bytescheduler`` or ``prophet``; ``settings`` are for the last two.
    - ``dscps``: the six code points that the hosts were attached with.
    - ``timeout_s``: how long any wait for another rank may take.
    - ``broadcast_buffers``: send rank 0's buffers (BatchNorm's statistics) to all before a training
      forward, as DistributedDataParallel does.
    - ``strict``: raise, naming it, when a parameter whose update is due is read in a place that
      never read it while tlsched learned; otherwise that read waits.
    - ``trace``: record when each bucket was ready, sent and needed (``run.trace``).
    - ``lanes``: which of the six lanes this training uses, most urgent first (default: all). Of two
      trainings on the same links, one with ``range(0, 3)`` takes precedence over one with
      ``range(3, 6)``. For ``kernel`` and ``lanes``, which spread buckets over several.
    - ``backend``: ``gloo`` or ``nccl``; by default the latter when the parameters live on CUDA.
      ``ps``: gradients go through parameter servers.
    - ``servers`` of ``ps``: None for one on each worker's host, started here; a number for so many
      last ranks of the job, which serve until the workers leave and then end; or a list of
      addresses (``"10.0.0.5:7150"``) at which ``tlsched server`` listens.

    Raises ConfigError for a bad argument and ModelRefused for what cannot be trained this way, both
    before anything is changed.
    """
    make_policy(policy, Plan((), ()))  # refuses an unknown one
    settings, use = _lanes_of(policy, settings or PolicySettings(), lanes)
    traits = traits_of(policy, settings)
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s}", hint="give a positive number of seconds")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers:
        raise ConfigError("no optimizer was given", hint="pass the one that the loop steps")
    for one in optimizers:
        refuse_unsuitable(one)
    membership.refuse_unsuitable(model)
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised",
            hint='call torch.distributed.init_process_group("gloo") first, for instance under '
            "torchrun",
        )
    if servers is not None and backend != "ps":
        raise ConfigError(
            'servers are given without backend="ps"', hint="add it, or leave them out"
        )
    every = lane_bands(dscps)
    marks = [every[lane] for lane in use] if traits.marked else ()
    transport = choose_backend(model, backend, traits.lane_count, marks)
    if transport.one_order:
        in_one_order(traits)
    return Run(
        model,
        optimizers,
        policy,
        settings,
        transport,
        process_group,
        tuple(dscps),
        use,
        timeout_s,
        broadcast_buffers,
        strict,
        trace,
        choose_servers(model, servers) if backend == "ps" else None,
    )


def _lanes_of(
    policy: str, settings: PolicySettings, lanes: Sequence[int] | None
) -> tuple[PolicySettings, tuple[int, ...]]:
    """``settings`` for as many lanes as the training uses, and which of the six these are."""
    if lanes is None:
        return replace(settings, lane_count=LANE_COUNT), tuple(range(LANE_COUNT))
    use = check_lanes(lanes)
    if policy not in SPREADING:
        raise ConfigError(
            f'policy="{policy}" spreads nothing over lanes',
            hint=f"leave lanes out, or use one of {', '.join(SPREADING)}",
        )
    return replace(settings, lane_count=len(use)), use
