"""Run: one training context, from the opening of its lanes until all is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from tlsched.bands import lane_bands
from tlsched.errors import CommunicationError, TrainingError
from tlsched.planning.plan import Plan
from tlsched.planning.policies import PolicySettings, make_policy
from tlsched.planning.policies.base import PIECES_LANE
from tlsched.planning.profile import Profile
from tlsched.planning.tuning import BayesianSearch, Tuning, can_search
from tlsched.shim import backward, reads, report
from tlsched.shim.agreement import Agreement, model_signature
from tlsched.shim.buffers import Buffers
from tlsched.shim.engine import Engine
from tlsched.shim.gradients import Gradients
from tlsched.shim.lanes import Lane, mark_lanes, open_lanes
from tlsched.shim.ordering import what_orders_nothing
from tlsched.shim.orders import Follower, Leader, open_orders
from tlsched.shim.telling import tell
from tlsched.shim.trace import Trace
from tlsched.shim.transport import Transport

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
    ) -> None:
        self.model = model
        self.policy_name = policy
        self._traits = make_policy(policy, Plan((), ()), settings)  # how many lanes, marked or not
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
        self._lanes: list[Lane] = []
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
    def profile(self) -> Profile | None:
        """What was measured of the model, for ``run.profile.save(path)``; None until it is."""
        return self._opened().profile

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
        group = self._process_group or dist.group.WORLD
        assert group is not None
        self._agreement = agreement = Agreement(group, self._timeout_s)
        transport = self._transport
        facts = [self.policy_name, f"DSCPs {self._dscps}", transport.name, *transport.facts]
        facts.append(f"broadcast_buffers {self._broadcast_buffers}")
        facts.append(f"settings {self._settings}")
        facts.append(f"lanes {self._use}")
        agreement.require_same("policy", facts)
        agreement.require_same("model", model_signature(self.model))
        self._lanes = open_lanes(agreement, self._traits.lane_count, transport)
        for finding in transport.findings():
            self._say(finding)
        if self._traits.marked:
            self._mark(agreement)
        if self._traits.dictated:
            self._orders = open_orders(agreement, self._lanes[PIECES_LANE], self._tuning)
        self._lanes[0].broadcast((*self.model.parameters(), *self.model.buffers()))
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
            self._buffers = Buffers(self.model, self._lanes[0], lambda: engine.backwards)
        engine.start(self._given_optimizers)
        reads.watch(engine.outside)
        backward.watch(engine)

    def _tuning(self) -> Tuning | None:
        """What tunes a window that the user leaves open."""
        if self._settings.window is not None:
            return None
        if not can_search():
            self._say(
                "pieces and credit stay at their defaults: `pip install 'tlsched[tune]'` to have "
                "them tuned"
            )
            return None
        sizes = [p.numel() * p.element_size() for p in self.model.parameters()]
        return Tuning(BayesianSearch(max(sizes)))

    def _mark(self, agreement: Agreement) -> None:
        bands = lane_bands(self._dscps)
        why_not = mark_lanes(agreement, self._lanes, [bands[lane] for lane in self._use])
        if why_not is not None:
            self._say(f"the lanes are not marked, so the kernel cannot order them: {why_not}")
            return
        pairs = {(c.local[0], c.peer[0]) for lane in self._lanes for c in lane.marked}
        if advice := what_orders_nothing(pairs):
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
        self._lanes, self._orders = [], None

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
