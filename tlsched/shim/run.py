"""Run: one training context, from the opening of its lanes until all is as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from tlsched.bands import lane_bands
from tlsched.errors import CommunicationError, TrainingError
from tlsched.planning.plan import Plan
from tlsched.planning.policies import PolicySettings, traits_of
from tlsched.planning.policies.base import PIECES_LANE
from tlsched.planning.profile import Profile
from tlsched.shim import backward, reads, report
from tlsched.shim.agreement import Agreement, model_signature
from tlsched.shim.buffers import Buffers
from tlsched.shim.engine import Engine
from tlsched.shim.gradients import Gradients
from tlsched.shim.lane import AnyLane
from tlsched.shim.lanes import Lane, mark_lanes, open_lanes
from tlsched.shim.ordering import what_orders_nothing
from tlsched.shim.orders import Follower, Leader, open_orders
from tlsched.shim.ps.choosing import Servers
from tlsched.shim.ps.opening import Found, open_served_lanes
from tlsched.shim.ps.ranks import meet
from tlsched.shim.telling import tell
from tlsched.shim.trace import Trace
from tlsched.shim.transport import Transport
from tlsched.shim.window import tuning_of

# How long the updates that step() promised may still take when training ends with an exception.
FINISH_S = 5.0


class Run:
    """One training context, made by :func:`tlsched.schedule`; its methods are for use inside it."""

    def __init__(
        self,
        model: Module,
        optimizers: list[Optimizer],
        policy: str,
        settings: PolicySettings,
        transport: Transport,
        process_group: dist.ProcessGroup | None,
        dscps: tuple[int, ...],
        use: tuple[int, ...],
        timeout_s: float,
        broadcast_buffers: bool,
        strict: bool,
        trace: bool,
        servers: Servers | None = None,
    ) -> None:
        self.model = model
        self.policy_name = policy
        self._traits = traits_of(policy, settings)
        self.trace: Trace | None = Trace() if trace else None
        self._settings = settings
        self._given_optimizers = optimizers
        self._transport = transport
        self._process_group = process_group
        self._dscps = dscps
        self._use = use
        self._timeout_s = timeout_s
        self._broadcast_buffers = broadcast_buffers
        self._strict = strict
        self._entered = False
        self._agreement: Agreement | None = None
        self._servers = servers
        self._lanes: Sequence[AnyLane] = ()
        self._orders: Leader | Follower | None = None
        self._engine: Engine | None = None
        self._buffers: Buffers | None = None
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
        return self._opened().gradients.policy.plan

    @property
    def workers(self) -> int:
        """How many ranks train: what a data sampler has to divide by."""
        self._opened()
        assert self._agreement is not None
        return self._agreement.size

    @property
    def profile(self) -> Profile | None:
        """What was measured of the model, for ``run.profile.save(path)``; None until it is."""
        return self._opened().profile

    @property
    def settings(self) -> PolicySettings:
        """What the policy goes by: the ``settings`` given, and the window that tuning has found.

        Given to the next ``schedule()``, that window is used from the start. It is found on rank 0,
        which tells the others what to send.
        """
        tuning = self._orders.tuning if isinstance(self._orders, Leader) else None
        if tuning is None or not tuning.finished:
            return self._settings
        return replace(self._settings, window=tuning.window)

    @property
    def messages(self) -> int:
        """All-reduces that this rank has started so far, those of learning included."""
        return sum(self._agreement.roster.started) if self._agreement is not None else 0

    @property
    def learning(self) -> bool:
        """Whether all is synchronous still, because tlsched learns how the model is used."""
        return self._engine is None or self._engine.learning

    def flush(self) -> None:
        """Wait for every gradient and do every update that is due."""
        if self._engine is not None:
            self._engine.flush()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; the first one outside averages all that accumulated."""
        engine = self._opened()
        before, engine.gradients.enabled = engine.gradients.enabled, False
        try:
            yield
        finally:
            # The buckets may have been made anew meanwhile.
            engine.gradients.enabled = before

    def report(self) -> list[dict[str, Any]]:
        """One row a bucket: lane, bytes, parameters, seconds waited, and why (see report.rows)."""
        return report.rows(self._opened(), self._use)

    def _open(self) -> None:
        agreement = self._open_lanes()
        control = self._lanes[0].control
        control.broadcast((*self.model.parameters(), *self.model.buffers()))
        device = next(self.model.parameters()).device
        start_s = max(agreement.gather("lanes' speed", self._lanes[0].start_s(device)))
        self._engine = engine = Engine(
            self.model,
            agreement,
            self._lanes,
            self.policy_name,
            settings=self._settings,
            orders=self._orders,
            timeout_s=self._timeout_s,
            strict=self._strict,
            trace=self.trace,
            start_s=start_s,
            say=self._say,
        )
        if self._broadcast_buffers:
            self._buffers = Buffers(self.model, control, lambda: engine.backwards)
        engine.start(self._given_optimizers)
        reads.watch(engine.outside)
        backward.watch(engine)

    def _open_lanes(self) -> Agreement:
        """Meet the other ranks and open the lanes, with their marks and rank 0's orders."""
        agreement, found = self._meet()
        agreement.require_same("model", model_signature(self.model))
        count = self._traits.lane_count
        every = lane_bands(self._dscps)
        bands = [every[lane] for lane in self._use] if self._traits.marked else []
        if found is None:
            lanes = open_lanes(agreement, count, self._transport)
            self._lanes, orders = lanes, lanes[min(PIECES_LANE, count - 1)]
            marked: Sequence[Lane] = lanes
        else:
            hold = not self._traits.immediate
            served = open_served_lanes(agreement, found, count, bands, hold=hold)
            self._lanes, orders = served, served[0].control
            marked = [orders]  # the others were marked when they connected
        for finding in self._transport.findings():
            self._say(finding)
        if bands:
            self._tell_of_marks(mark_lanes(agreement, marked, bands[: len(marked)]))
        if self._traits.dictated:
            tuning = partial(tuning_of, self.model, self._settings, self._say)
            self._orders = open_orders(agreement, orders, tuning)
        return agreement

    def _meet(self) -> tuple[Agreement, Found | None]:
        """The ranks that train, and the servers that they use, if they do.

        On a rank that serves it serves, and ends with SystemExit when the others have left.
        """
        group = self._process_group or dist.group.WORLD
        assert group is not None
        servers, transport = self._servers, self._transport
        facts = [self.policy_name, f"DSCPs {self._dscps}", transport.name, *transport.facts]
        facts.append(f"broadcast_buffers {self._broadcast_buffers}")
        facts += [f"lanes {self._use}", f"settings {self._settings}", f"{servers or 'no servers'}"]
        if servers is not None and servers.ranks:
            self._agreement, found = meet(group, self._timeout_s, servers.ranks, facts)
            return self._agreement, found
        self._agreement = Agreement(group, self._timeout_s)
        self._agreement.require_same("policy", facts)
        return self._agreement, None if servers is None else servers.found()

    def _tell_of_marks(self, why_not: str | None) -> None:
        """Say what keeps the kernel from ordering the lanes; ``why_not`` are they unmarked."""
        if why_not is not None:
            self._say(f"the lanes are not marked, so the kernel cannot order them: {why_not}")
        elif advice := what_orders_nothing({p for lane in self._lanes for p in lane.pairs}):
            self._say(advice)

    def _say(self, text: str) -> None:
        """Tell the user once."""
        if text not in self._said:
            self._said.add(text)
            tell(text)

    def _opened(self) -> Engine:
        if self._engine is None:
            raise TrainingError(
                "the context is not open", hint="use `with tlsched.schedule(…) as run:`"
            )
        return self._engine

    def _close(self, error: BaseException | None) -> None:
        """Leave, after ``error`` without waiting for anybody. Every part is tried."""
        with ExitStack() as parts:  # called last to first
            engine = self._engine
            if engine is not None:
                parts.callback(engine.close)
            for lane in self._lanes:
                parts.callback(lane.close, abort=error is not None)
            if self._orders is not None:
                parts.callback(self._orders.close)
            if engine is not None:
                parts.callback(engine.gradients.sending.stop)
            if self._agreement is not None:
                parts.callback(self._agreement.roster.leave, self._farewell(error))
            if engine is not None:
                for optimizer in engine.steps:
                    parts.callback(optimizer.close)
                if error is not None:
                    parts.callback(self._finish, engine.gradients, error)
                parts.callback(engine.stop_watching)
                parts.callback(reads.unwatch, engine.outside)
                parts.callback(backward.unwatch, engine)
            if self._buffers is not None:
                parts.callback(self._buffers.close)
        self._forget()

    def _forget(self) -> None:
        """Let go of everything: ``run`` may live on, and with it a traceback's frames."""
        self._agreement = self._engine = self._buffers = None
        self._lanes, self._orders = (), None

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
            counts = self._engine.steps.values() if self._engine is not None else ()
            steps = ", ".join(str(number) for number in counts)
            return f"its loop ended after {steps} steps"
        return f"{type(error).__name__}: {error}".partition("\n")[0]
