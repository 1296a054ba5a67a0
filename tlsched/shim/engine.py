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
from torch.utils.hooks import RemovableHandle

from tlsched.errors import TrainingError
from tlsched.planning.plan import Plan, make_plan
from tlsched.planning.policies import Policy, PolicySettings, in_one_order, make_policy
from tlsched.planning.profile import Profile
from tlsched.shim import compiled, learning, membership, reads
from tlsched.shim.accumulation import Hook
from tlsched.shim.agreement import Agreement
from tlsched.shim.bucket import Bucket
from tlsched.shim.gradients import Gradients
from tlsched.shim.guards import Readers, guard_modules
from tlsched.shim.lanes import Lane
from tlsched.shim.optimizer import DeferredOptimizer
from tlsched.shim.orders import Follower, Leader
from tlsched.shim.replanning import Replanner
from tlsched.shim.sparse import SparseGradients, sparse_parameters
from tlsched.shim.trace import Trace

# Two, because what is read between step() and the next forward shows only in the second.
LEARNING_STEPS = 2


class Engine:
    """Trains ``model`` over ``lanes``; ``say`` tells once, ``strict`` raises on late reads.

    Nothing happens before :meth:`start`.
    """

    def __init__(
        self,
        model: Module,
        agreement: Agreement,
        lanes: Sequence[Lane],
        policy_name: str,
        *,
        settings: PolicySettings,
        orders: Leader | Follower | None,
        timeout_s: float,
        strict: bool,
        trace: Trace | None,
        say: Callable[[str], None],
    ) -> None:
        self.model = model
        self.say = say
        self._given_trace = trace
        self._replanner: Replanner | None = None
        self.strict = strict
        self.steps: dict[DeferredOptimizer, int] = {}
        self.eager: list[Bucket] = []
        self.backwards = 0
        self.late: dict[str, int] = {}
        self.whole: str | None = None
        self._agreement = agreement
        self._lanes = lanes
        self._policy_name = policy_name
        self._settings = settings
        self._orders = orders
        self._timeout_s = timeout_s
        self._guards: list[RemovableHandle | compiled.Boundary] = []
        self._joining: list[Hook] = []
        self._joined = False
        self._walked = False
        self._ids: list[tuple[int, ...]] = []
        self.sparse = SparseGradients(sparse_parameters(model), lanes[0], agreement.size)
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
        self._take_guards()

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

    def settle_updates(self) -> None:
        """Somebody reads the parameters from outside: do the updates that are due."""
        if any(bucket.updates for bucket in self.gradients.buckets):
            self.flush()

    def steps_with(self, optimizer: Optimizer) -> bool:
        """See :class:`tlsched.shim.reads.Watching`."""
        return any(one.optimizer is optimizer for one in self.steps)

    def enter_compiled(self) -> None:
        """See :class:`tlsched.shim.reads.Watching`."""
        if any(bucket.updates for bucket in self.gradients.buckets):
            self.say(
                "a compiled function waits for every update; give schedule() the compiled module "
                "to wait for its own parameters only"
            )
            self.flush()

    def walk_parameters(self) -> None:
        """See :class:`tlsched.shim.reads.Watching`."""
        if self.learning:
            self._walked = self._walked or self._between_step_and_forward()
        elif any(bucket.updates for bucket in self.gradients.buckets):
            if self.strict and not self._walked:
                self.read_late(next(b for b in self.gradients.buckets if b.updates).names[0])
            self.say(
                "model.parameters() between step() and forward waits for every update; use "
                "optimizer.zero_grad() to clear gradients"
            )
            self.flush()

    def _between_step_and_forward(self) -> bool:
        return any(self.steps.values()) and not (self._readers and self._readers.need_order)

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
        if self.strict:
            raise TrainingError(
                f"{name} is read where tlsched never saw it read while it learned, and its update "
                "is still due",
                hint="call run.flush() before this read, or leave strict out: the read then waits",
            )
        self.late[name] = self.late.get(name, 0) + 1

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
        membership.admit(self._agreement, self._lanes[0], joined, self._timeout_s)
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
        learned = self.gradients
        order = learning.need_order(watched, self._names)
        mine = make_plan(
            learning.facts(order, self._names, watched.first_module),
            learning.ready_rank(learned, order, self._names),
        )
        plan, firings = self._agreement.from_rank_0("plan", (mine, learned.firings))
        membership.refuse_different(mine, plan)
        self._agreement.require_same("plan", [plan.digest()])
        self.gradients = self._new_gradients(
            self._policy(plan),
            learning=False,
            firings=firings,
            trace=self.trace,
            earlier=learned.hand_over(),
        )
        self.sparse.attach(self.gradients)
        self.gradients.enabled = learned.enabled
        if self.gradients.policy.lane_count > 1:
            self._replanner = Replanner(
                self._agreement,
                self._given_trace,
                hold_back=not self._lanes[0].transport.one_order,
            )
        needs, self.eager = learning.needs(self.model, watched, self.gradients)
        self._guards = [
            *guard_modules(self.model, needs, self._wait_for),
            *compiled.guard(self.model, needs, self._wait_for),
        ]

    def _policy(self, plan: Plan) -> Policy:
        settings = self._settings
        measured = self._replanner
        if measured is not None and measured.profile is not None:
            settings = replace(settings, profile=measured.profile, fabric=measured.fabric)
        policy = make_policy(self._policy_name, plan, settings)
        return in_one_order(policy) if self._lanes[0].transport.one_order else policy

    def _take_guards(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards = []

    def _wait_for(self, buckets: tuple[Bucket, ...]) -> None:
        for bucket in buckets:
            if self.trace is not None:
                self.trace.needed(bucket.index)
            if bucket.pending:
                before_s = bucket.waited_s
                bucket.settle()
                if self.trace is not None:
                    self.trace.waited(bucket.waited_s - before_s)
