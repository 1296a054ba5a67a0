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

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tlsched.bands import DEFAULT_DSCPS, LANE_COUNT, lane_bands
from tlsched.errors import CommunicationError, ConfigError, ModelRefused, TrainingError
from tlsched.planning.plan import Plan, make_plan
from tlsched.planning.policies import POLICIES, make_policy
from tlsched.shim import learning, reads
from tlsched.shim.agreement import Agreement, model_signature
from tlsched.shim.bucket import Bucket
from tlsched.shim.gradients import Gradients
from tlsched.shim.guards import Readers, guard_modules
from tlsched.shim.lanes import Lane, mark_lanes, open_lanes
from tlsched.shim.optimizer import DeferredOptimizer, refuse_unsuitable
from tlsched.shim.ordering import unordered_interfaces
from tlsched.shim.trace import Trace

# Two, because what is read between step() and the next forward shows only in the second.
LEARNING_STEPS = 2

# How long the updates that step() promised may still take when training ends with an exception.
FINISH_S = 5.0


def schedule(
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str = "kernel",
    process_group: dist.ProcessGroup | None = None,
    dscps: Sequence[int] = DEFAULT_DSCPS,
    timeout_s: float = 300.0,
    trace: bool = False,
) -> Run:
    """Train ``model`` data-parallel over ``process_group`` (default: all ranks).

    Use the result as a context manager around the training loop. The arguments:

    - ``policy``: ``kernel`` (default), ``lanes`` (the same, unmarked), ``fifo`` or ``sync``.
    - ``dscps``: the six code points that the hosts were attached with.
    - ``timeout_s``: how long any wait for another rank may take.
    - ``trace``: record when each bucket was ready, sent and needed (``run.trace``).

    Raises ConfigError for a bad argument and ModelRefused for what cannot be trained this way, both
    before anything is changed.
    """
    if policy not in POLICIES:
        raise ConfigError(
            f"there is no policy {policy!r}", hint=f"use one of {', '.join(POLICIES)}"
        )
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s}", hint="give a positive number of seconds")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers:
        raise ConfigError("no optimizer was given", hint="pass the one that the loop steps")
    for one in optimizers:
        refuse_unsuitable(one)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelRefused(
            "the model has no parameter that requires a gradient",
            hint="call the model without tlsched.schedule(), or unfreeze some of it",
        )
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised",
            hint='call torch.distributed.init_process_group("gloo") first, for instance under '
            "torchrun",
        )
    lane_bands(dscps)  # complains about bad ones
    return Run(model, optimizers, policy, process_group, tuple(dscps), timeout_s, trace)


class Run:
    """One training context, made by :func:`schedule`; its methods are for use inside it."""

    def __init__(
        self,
        model: Module,
        optimizers: list[Optimizer],
        policy: str,
        process_group: dist.ProcessGroup | None,
        dscps: tuple[int, ...],
        timeout_s: float,
        trace: bool,
    ) -> None:
        self.model = model
        self.policy_name = policy
        self.trace: Trace | None = Trace() if trace else None
        self.learning = True
        self._given_optimizers = optimizers
        self._process_group = process_group
        self._dscps = dscps
        self._timeout_s = timeout_s
        self._entered = False
        self._agreement: Agreement | None = None
        self._lanes: list[Lane] = []
        self._names: dict[Parameter, str] = {}
        self._optimizers: list[DeferredOptimizer] = []
        self._steps: dict[DeferredOptimizer, int] = {}
        self._guards: list[RemovableHandle] = []
        self._eager: list[Bucket] = []
        self._gradients: Gradients | None = None
        self._readers: Readers | None = None
        self._said: set[str] = set()

    def __enter__(self) -> Run:
        """Open the lanes, take rank 0's parameters and begin to learn."""
        if self._entered:
            raise TrainingError(
                "this context was entered before", hint="call tlsched.schedule() again"
            )
        self._entered = True
        try:
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flush and leave model and optimizer as they were.

        After an exception, what step() left due gets a few seconds at most, and the other ranks are
        told why this one leaves.
        """
        try:
            if error is None:
                self.flush()
        except BaseException as failure:
            self._close(failure)
            raise
        self._close(error)

    @property
    def plan(self) -> Plan:
        """Bucket to lane, as it is in force."""
        return self._buckets_of().policy.plan

    def flush(self) -> None:
        """Wait for every gradient and do every update that is due."""
        if self._gradients is not None:
            with self._unwatched():
                self._gradients.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; the first one outside averages all that accumulated."""
        gradients = self._buckets_of()
        before, gradients.enabled = gradients.enabled, False
        try:
            yield
        finally:
            # The buckets may have been made anew meanwhile.
            gradients.enabled = before
            self._buckets_of().enabled = before

    def report(self) -> list[dict[str, Any]]:
        """One row a bucket: its lane, bytes, parameters, seconds waited for it in all, and why."""
        eager = {bucket.index for bucket in self._eager}
        rows = []
        for bucket in self._buckets_of().buckets:
            why = "read outside any forward" if bucket.index in eager else "needed by forward"
            rows.append(
                {
                    "bucket": bucket.index,
                    "lane": bucket.lane,
                    "bytes": bucket.flat.numel() * bucket.flat.element_size(),
                    "parameters": list(bucket.names),
                    "waited_s": bucket.waited_s,
                    "why": "learning" if self.learning else why,
                }
            )
        return rows

    def _open(self) -> None:
        group = self._process_group or dist.group.WORLD
        assert group is not None
        self._agreement = agreement = Agreement(group, self._timeout_s)
        agreement.require_same("policy", [self.policy_name, f"DSCPs {self._dscps}"])
        agreement.require_same("model", model_signature(self.model))
        count = LANE_COUNT if self.policy_name in ("kernel", "lanes") else 1
        self._lanes = open_lanes(agreement, count)
        if self.policy_name == "kernel":
            self._mark(agreement)
        self._lanes[0].broadcast((*self.model.parameters(), *self.model.buffers()))
        self._names = {p: n for n, p in self.model.named_parameters() if p.requires_grad}
        self._readers = Readers(self.model, self._names)
        policy = make_policy("sync", learning.first_plan(self._names))
        self._gradients = Gradients(
            self._names, policy, self._lanes, agreement.size, self._timeout_s, learning=True
        )
        for optimizer in self._given_optimizers:
            deferred = DeferredOptimizer(
                optimizer, lambda: self._buckets_of().place, self._before_step, self._after_step
            )
            self._optimizers.append(deferred)
            self._steps[deferred] = 0
        reads.watch(self)
        self._readers.start()

    def _mark(self, agreement: Agreement) -> None:
        why_not = mark_lanes(agreement, self._lanes, lane_bands(self._dscps))
        if why_not is not None:
            self._say(f"the lanes are not marked, so the kernel cannot order them: {why_not}")
            return
        interfaces = unordered_interfaces(
            {(c.local[0], c.peer[0]) for lane in self._lanes for c in lane.connections.values()}
        )
        if interfaces:
            self._say(
                f"the kernel does not order the lanes on {', '.join(interfaces)}: "
                f"run `tlsched attach --iface {interfaces[0]} --rate …` there as root"
            )

    def _say(self, text: str) -> None:
        """Tell the user once."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"tlsched: {text}", stacklevel=2)

    def _buckets_of(self) -> Gradients:
        if self._gradients is None:
            raise TrainingError(
                "the context is not open", hint="use `with tlsched.schedule(…) as run:`"
            )
        return self._gradients

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        if self._readers is not None:
            self._readers.pause(True)
        try:
            yield
        finally:
            if self._readers is not None:
                self._readers.pause(False)

    def _before_step(self) -> None:
        self._buckets_of().close_round()

    def _after_step(self, optimizer: DeferredOptimizer) -> None:
        gradients = self._buckets_of()
        self._steps[optimizer] += 1
        if self.trace is not None:
            self.trace.end_iteration()
        why = optimizer.why_at_once()
        if self.learning:
            self._learn()
        elif gradients.policy.barrier:
            gradients.settle()
        elif why is not None:
            self._say(f"step() waits for all gradients: {why}")
            gradients.settle()
        else:
            gradients.settle(self._eager)

    def _learn(self) -> None:
        self.flush()
        assert self._readers is not None
        self._readers.start_iteration()
        steps = self._steps.values()
        if min(steps) >= LEARNING_STEPS or sum(steps) >= 2 * LEARNING_STEPS * len(steps):
            with self._unwatched():
                self._start_overlap()

    def _start_overlap(self) -> None:
        """Make the plan from what was learned, agree on rank 0's, and begin to overlap."""
        watched, self._readers = self._readers, None
        assert watched is not None
        watched.stop()
        assert self._agreement is not None
        learned = self._buckets_of()
        order = learning.need_order(watched, self._names)
        mine = make_plan(
            learning.facts(order, self._names, watched),
            learning.ready_rank(learned, order, self._names),
        )
        plan, firings = self._agreement.from_rank_0("plan", (mine, learned.firings))
        self._say_if_different(mine, plan)
        learned.close()
        self._gradients = gradients = Gradients(
            self._names,
            make_policy(self.policy_name, plan),
            self._lanes,
            self._agreement.size,
            self._timeout_s,
            learning=False,
            firings=firings,
            trace=self.trace,
        )
        gradients.enabled = learned.enabled
        needs, self._eager = learning.needs(self.model, watched, gradients)
        self._guards = guard_modules(self.model, needs, self._wait_for)
        self.learning = False

    def _say_if_different(self, mine: Plan, taken: Plan) -> None:
        if {n for b in mine.buckets for n in b.names} != {
            n for b in taken.buckets for n in b.names
        }:
            raise TrainingError(
                "rank 0 trains other parameters than this rank",
                hint="freeze and unfreeze the same parameters on every rank",
            )

    def _wait_for(self, buckets: tuple[Bucket, ...]) -> None:
        for bucket in buckets:
            if self.trace is not None:
                self.trace.needed(bucket.index)
            if bucket.pending:
                bucket.settle()

    def settle_updates(self) -> None:
        """Somebody reads the parameters from outside: do the updates that are due."""
        if self._gradients is not None and any(b.updates for b in self._gradients.buckets):
            self.flush()

    def _close(self, error: BaseException | None) -> None:
        """Leave, after ``error`` without waiting for anybody. Every part is tried."""
        with ExitStack() as parts:  # called last to first
            if self._gradients is not None:
                parts.callback(self._gradients.close)
            for lane in self._lanes:
                parts.callback(lane.close, abort=error is not None)
            if self._agreement is not None:
                parts.callback(self._agreement.roster.leave, self._farewell(error))
            for optimizer in self._optimizers:
                parts.callback(optimizer.close)
            if error is not None and self._gradients is not None:
                parts.callback(self._finish, self._gradients, error)
            if self._readers is not None:
                parts.callback(self._readers.stop)
            for handle in self._guards:
                parts.callback(handle.remove)
            parts.callback(reads.unwatch, self)
        self._forget()

    def _forget(self) -> None:
        """Let go of everything: ``run`` may live on, and with it a traceback's frames."""
        self._agreement = self._gradients = self._readers = None
        self._lanes, self._optimizers, self._guards, self._eager = [], [], [], []
        self._names, self._steps = {}, {}

    def _finish(self, gradients: Gradients, error: BaseException) -> None:
        limit_s = 0.0 if isinstance(error, CommunicationError) else min(FINISH_S, self._timeout_s)
        try:
            dropped = gradients.finish(limit_s)
        except Exception as failure:  # the loop's own exception is the one to see
            self._say(f"the update that step() promised failed ({failure})")
            return
        if dropped:
            self._say(
                f"the update that step() promised is missing on {dropped} of "
                f"{len(gradients.buckets)} buckets, whose averages did not arrive: parameters are "
                "not consistent; go on from a checkpoint"
            )

    def _farewell(self, error: BaseException | None) -> str:
        if error is None:
            steps = ", ".join(str(number) for number in self._steps.values())
            return f"its loop ended after {steps} steps"
        return f"{type(error).__name__}: {error}".partition("\n")[0]
