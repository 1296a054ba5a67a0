"""What happens between backward and forward while a context is open.

The first iterations run synchronously and are watched; then a plan is made, rank 0's is taken by
all, and step() returns at once. When parameters join (unfrozen, or added to an optimizer), the
engine follows: it learns again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from tlsched.planning.plan import Plan, make_plan
from tlsched.planning.policies import Policy, PolicySettings, in_one_order, make_policy
from tlsched.planning.profile import Profile
from tlsched.shim import learning, membership, reads
from tlsched.shim.accumulation import Hook
from tlsched.shim.agreement import Agreement
from tlsched.shim.bucket import Bucket
from tlsched.shim.gradients import Gradients
from tlsched.shim.guards import Readers
from tlsched.shim.lane import AnyLane
from tlsched.shim.optimizer import DeferredOptimizer
from tlsched.shim.orders import Follower, Leader
from tlsched.shim.outside import OutsideReads
from tlsched.shim.replanning import Replanner
from tlsched.shim.sparse import SparseGradients, sparse_parameters
from tlsched.shim.trace import Trace
from tlsched.shim.waiting import Waits

# Two, because what is read between step() and the next forward shows only in the second.
LEARNING_STEPS = 2


class Engine:
    """Trains ``model`` over ``lanes``; ``say`` tells once, ``strict`` raises on late reads.

    ``start_s`` is what an all-reduce of nothing takes.
    Nothing happens before :meth:`start`.
    """

    def __init__(
        self,
        model: Module,
        agreement: Agreement,
        lanes: Sequence[AnyLane],
        policy_name: str,
        *,
        settings: PolicySettings,
        orders: Leader | Follower | None,
        timeout_s: float,
        strict: bool,
        trace: Trace | None,
        start_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.model = model
        self.say = say
        self._given_trace = trace
        self._replanner: Replanner | None = None
        self.steps: dict[DeferredOptimizer, int] = {}
        self.eager: list[Bucket] = []
        self.backwards = 0
        self.whole: str | None = None
        self._agreement = agreement
        self._lanes = lanes
        self._policy_name = policy_name
        self._settings = settings
        self._orders = orders
        self._timeout_s = timeout_s
        self.outside = OutsideReads(self, say, strict=strict)
        self._waits = Waits(model, lambda: self.trace)
        self._start_s = start_s
        self._joining: list[Hook] = []
        self._joined = False
        self._ids: list[tuple[int, ...]] = []
        self.sparse = SparseGradients(sparse_parameters(model), lanes[0].control, agreement.size)
        self._begin_to_learn()

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Stand in the optimizers' step() and begin to record."""
        for optimizer in optimizers:
            self.steps[DeferredOptimizer(optimizer, self)] = 0
        self._ids = [one.parameter_ids() for one in self.steps]
        self._start_readers()

    def stop_watching(self) -> None:
        """Take the recorder and the guards out of the model."""
        if self._readers is not None:
            self._readers.stop()
        self._waits.remove()

    def close(self) -> None:
        """Leave ordinary gradients behind. Waits for nobody."""
        self.sparse.close()
        self._leave_gradients()

    def _leave_gradients(self) -> None:
        for hook in self._joining:
            hook.remove()
        self.gradients.close()

    @property
    def learning(self) -> bool:
        """Whether all is synchronous still."""
        return self._readers is not None

    @property
    def trace(self) -> Trace | None:
        """Where times are noted, if somebody wants them just now."""
        return self._given_trace if self._replanner is None else self._replanner.trace

    @property
    def profile(self) -> Profile | None:
        """The profile that the plan in force was made from, if it was measured."""
        return None if self._replanner is None else self._replanner.profile

    @property
    def place(self) -> Mapping[Parameter, tuple[Bucket, int]]:
        """See :class:`tlsched.shim.optimizer.Context`."""
        return self.gradients.place

    def flush(self) -> None:
        """Wait for every gradient and do every update that is due."""
        with self._unwatched():
            self.gradients.settle()

    def steps_with(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` is one of this context's."""
        return any(one.optimizer is optimizer for one in self.steps)

    @property
    def before_forward(self) -> bool:
        """Whether step() was called and no forward has read anything since."""
        return any(self.steps.values()) and not (self._readers and self._readers.need_order)

    @property
    def due(self) -> Iterator[Bucket]:
        """The buckets on which updates are due."""
        return (bucket for bucket in self.gradients.buckets if bucket.updates)

    def before_step(self) -> None:
        """See :class:`tlsched.shim.optimizer.Context`."""
        self.gradients.close_round()
        self._follow_changes()

    def after_step(self, optimizer: DeferredOptimizer) -> None:
        """See :class:`tlsched.shim.optimizer.Context`."""
        self.steps[optimizer] += 1
        if self.trace is not None:
            self.trace.end_iteration()
        why = optimizer.why_at_once()
        if why is None and not reads.can_watch_compiled():
            why = "this version of torch does not tell where compiled code begins"
        self.whole = optimizer.separability.why_whole or why
        if self.learning:
            self._learn()
        elif self.gradients.policy.barrier:
            self.flush()
        else:
            if why is not None:
                self.say(f"step() waits for all gradients: {why}")
            self.gradients.settle(None if why is not None else self.eager)
            self._replan()  # a meeting of all ranks, and perhaps only this one has a reason

    def _replan(self) -> None:
        """Take the lanes that were chosen anew, if they were."""
        if self._replanner is None:
            return
        gradients = self.gradients
        plan = self._replanner.after_step(gradients.policy.plan, gradients.buckets)
        gradients.trace = self.trace
        if plan is not None:
            gradients.follow(self._policy(plan))

    def backward_began(self) -> None:
        """See :class:`tlsched.shim.backward.Listener`."""
        if self.trace is not None:
            self.trace.backward_began()

    def backward_ended(self) -> None:
        """See :class:`tlsched.shim.backward.Listener`."""
        if self.trace is not None:
            self.trace.backward_ended()
        if self.gradients.round_open:
            self.gradients.close_round()
            self.after_backward()

    def backward_failed(self) -> None:
        """See :class:`tlsched.shim.backward.Listener`."""
        self.gradients.abandon_round()

    def agree(self, what: str, lines: Sequence[str]) -> None:
        """See :class:`tlsched.shim.gradients.Watcher`."""
        self._agreement.require_same(what, lines)

    def after_backward(self) -> None:
        """See :class:`tlsched.shim.gradients.Watcher`."""
        self.backwards += 1
        self._follow_changes()

    def _follow_changes(self) -> None:
        """Take in the parameters that joined."""
        ids = [one.parameter_ids() for one in self.steps]
        if not self._joined and ids == self._ids:
            return
        self._joined, self._ids = False, ids
        names, _ = membership.trained(self.model, self.sparse.names)
        joined = {p: n for p, n in names.items() if p not in self._names}
        if joined:
            self._follow(joined)

    def read_late(self, name: str) -> None:
        """See :class:`tlsched.shim.gradients.Watcher`."""
        self.outside.read_late(name)

    def outside_buckets(self, parameter: Parameter) -> None:
        """See :class:`tlsched.shim.optimizer.Context`."""
        if parameter not in self.sparse.names:
            self.say(membership.why_alone(self.model, parameter))

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        if self._readers is not None:
            self._readers.pause(True)
        try:
            yield
        finally:
            if self._readers is not None:
                self._readers.pause(False)

    def _begin_to_learn(self) -> None:
        """Buckets for what is trained now, all synchronous."""
        self._names, frozen = membership.trained(self.model, self.sparse.names)
        policy = make_policy("sync", learning.first_plan(self._names))
        self.gradients = self._new_gradients(policy, learning=True)
        self.sparse.attach(self.gradients)
        self._joining = membership.watch(frozen, self._on_joining)
        self.eager = []
        self._replanner = None
        self._readers: Readers | None = Readers(self.model, self._names)

    def _start_readers(self) -> None:
        assert self._readers is not None
        self._readers.start()

    def _new_gradients(self, policy: Any, **options: Any) -> Gradients:
        return Gradients(
            self._names,
            policy,
            self._lanes,
            self._agreement.size,
            self._timeout_s,
            self,
            sparse=self.sparse,
            orders=self._orders,
            **options,
        )

    def _on_joining(self) -> None:
        if self.gradients.enabled:
            self._joined = True
            self.gradients.open_round()

    def _follow(self, joined: dict[Parameter, str]) -> None:
        """Average what joined, on all ranks, and learn again."""
        self.flush()
        enabled = self.gradients.enabled
        self.stop_watching()
        self._leave_gradients()
        membership.admit(self._agreement, self._lanes[0].control, joined, self._timeout_s)
        self.say(f"{', '.join(joined.values())} joined what is trained: learning again")
        self._begin_to_learn()
        self.gradients.enabled = enabled
        self.steps = dict.fromkeys(self.steps, 0)
        self._start_readers()

    def _learn(self) -> None:
        self.flush()
        assert self._readers is not None
        self._readers.start_iteration()
        steps = self.steps.values()
        if min(steps) >= LEARNING_STEPS or sum(steps) >= 2 * LEARNING_STEPS * len(steps):
            with self._unwatched():
                self._start_overlap()

    def _start_overlap(self) -> None:
        """Make the plan from what was learned, agree on rank 0's, and begin to overlap."""
        watched, self._readers = self._readers, None
        assert watched is not None
        watched.stop()
        order = learning.need_order(watched, self._names)
        mine = make_plan(
            learning.facts(order, self._names, watched.first_module),
            learning.ready_rank(self.gradients, order, self._names),
            lane_count=self._settings.lane_count,
        )
        plan, firings = self._agreement.from_rank_0("plan", (mine, self.gradients.firings))
        membership.refuse_different(mine, plan)
        self._agreement.require_same("plan", [plan.digest()])
        self._overlap(plan, firings, watched)
        if self.gradients.policy.lane_count > 1:
            self._replanner = Replanner(
                self._agreement,
                self._given_trace,
                self._start_s,
                hold_back=not self._lanes[0].one_order,
                choose=not self.gradients.policy.pieces,
                lane_count=self._settings.lane_count,
            )

    def _overlap(self, plan: Plan, firings: dict[str, int], learned: Readers) -> None:
        """Go by ``plan`` from now on, with the buckets that it has; nothing may be under way."""
        before = self.gradients
        self.gradients = self._new_gradients(
            self._policy(plan),
            learning=False,
            firings=firings,
            trace=self.trace,
            earlier=before.hand_over(),
        )
        self.sparse.attach(self.gradients)
        self.gradients.enabled = before.enabled
        self.eager = self._waits.place(learned, self.gradients)

    def _policy(self, plan: Plan) -> Policy:
        settings = self._settings
        measured = self._replanner
        if measured is not None and measured.profile is not None:
            settings = replace(settings, profile=measured.profile, fabric=measured.fabric)
        policy = make_policy(self._policy_name, plan, settings)
        return in_one_order(policy) if self._lanes[0].one_order else policy
