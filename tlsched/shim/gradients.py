"""The gradients' way: backward fills buckets, complete buckets go to their lane by the policy.

A *round* is one backward. Each bucket is launched once in it, inside its lane in an order that all
ranks share; what backward did not reach is launched when the round closes, with zeros.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch.nn import Parameter

from tlsched.errors import ModelRefused, TrainingError
from tlsched.planning.policies import Policy
from tlsched.shim.accumulation import on_accumulation
from tlsched.shim.bucket import Bucket
from tlsched.shim.lane import AnyLane
from tlsched.shim.orders import Follower, Leader
from tlsched.shim.pending import PendingParameter, stale
from tlsched.shim.pieces import make_sending
from tlsched.shim.promise import Promise
from tlsched.shim.reduction import Running
from tlsched.shim.trace import Trace


class Watcher(Protocol):
    """The training context, as seen from here."""

    def after_backward(self) -> None:
        """A backward has ended and its buckets are launched."""

    def read_late(self, name: str) -> None:
        """The parameter ``name`` is read where no guard stands, while its update is due."""

    def say(self, text: str) -> None:
        """Tell the user once."""

    def agree(self, what: str, lines: Sequence[str]) -> None:
        """Raise unless every rank calls this with the same ``lines``."""


class AveragesLater(Protocol):
    """Gradients that are in no bucket."""

    def average(self) -> None:
        """Average them now, on all ranks."""


class Gradients:
    """Hooks on the parameters, the buckets they fill, and the lanes the buckets take.

    With ``learning``, nothing is launched before the round closes, and what is learned is kept:
    ``ready_order`` (names in the order of their gradients) and ``firings`` (how often backward
    accumulates into each parameter: more than once under reentrant checkpointing).
    ``watcher`` is the training context; ``orders`` are rank 0's where it dictates. ``earlier`` are
    the buckets of a :class:`Gradients` that was :meth:`handed over <hand_over>`.
    """

    def __init__(
        self,
        names: dict[Parameter, str],
        policy: Policy,
        lanes: Sequence[AnyLane],
        world_size: int,
        timeout_s: float,
        watcher: Watcher,
        *,
        sparse: AveragesLater,
        learning: bool,
        firings: dict[str, int] | None = None,
        trace: Trace | None = None,
        orders: Leader | Follower | None = None,
        earlier: Sequence[Bucket] = (),
    ) -> None:
        self.policy = policy
        self.enabled = True
        self.learning = learning
        self.ready_order: list[str] = []
        self.firings: dict[str, int] = firings or {}
        self._names = names
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._watcher = watcher
        self._sparse = sparse
        self.trace = trace
        self._round_open = False
        self._failed = False
        self._fired: dict[str, int] = {}
        self._late: set[int] = set()
        self._stale: set[int] = set()
        self.buckets = tuple(self._make_buckets(world_size, earlier))
        self.place = {
            parameter: (bucket, index)
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        self.sending = make_sending(policy, self.buckets, lanes, orders)
        # On autograd's node and not on the parameter: so the user's own hooks run before ours, and
        # see this rank's gradient as they do under DistributedDataParallel.
        self._hooks = [
            on_accumulation(parameter, functools.partial(self._on_gradient, parameter))
            for parameter in self.place
        ]

    def _make_buckets(self, world_size: int, earlier: Sequence[Bucket]) -> Iterator[Bucket]:
        """The plan's buckets: one that was there already stays, the others go one after another.

        So that never much more than one copy of the gradients is in memory.
        """
        planned = self.policy.plan.buckets
        wanted = {bucket.names for bucket in planned}
        kept = {bucket.names: bucket for bucket in earlier if bucket.names in wanted}
        released: dict[Parameter, torch.Tensor] = {}
        for bucket in earlier:
            if bucket.names not in wanted:
                released |= bucket.release()
        parameters = {name: parameter for parameter, name in self._names.items()}
        for index, plan in enumerate(planned):
            bucket = kept.get(plan.names) or Bucket(
                plan.names, [parameters[name] for name in plan.names], world_size
            )
            bucket.serve(index, plan.lane, self._wait, self._watcher.read_late)
            bucket.adopt(released)
            yield bucket

    def follow(self, policy: Policy) -> None:
        """Go by ``policy``, whose plan has the same buckets, from the next round on."""
        self.policy = policy

    def close(self) -> None:
        """Take the hooks away and leave ordinary tensors in ``p.grad``."""
        for bucket in self.hand_over():
            bucket.release()

    def hand_over(self) -> tuple[Bucket, ...]:
        """Take the hooks away and give up the buckets, with the gradients that they hold."""
        for hook in self._hooks:
            hook.remove()
        buckets, self.buckets, self.place = self.buckets, (), {}
        return buckets

    def settle(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait for ``buckets`` (default: all) and do the updates that are due on them."""
        self.close_round()
        for bucket in self.buckets if buckets is None else buckets:
            bucket.settle()

    def finish(self, limit_s: float) -> int:
        """Do what updates can be done within ``limit_s`` and drop the rest; how many were dropped.

        For when training ends with an exception: step() has promised these updates, but whether
        the other ranks still send their part is unknown.
        """
        end_s = time.monotonic() + limit_s
        dropped = 0
        for bucket in self.buckets:
            work = bucket.work
            if bucket.updates and (
                work is None or work.ends_within(max(0.0, end_s - time.monotonic()))
            ):
                bucket.settle()
            dropped += bool(bucket.updates) or bucket.torn
            bucket.drop_updates()
        return dropped

    def close_round(self) -> None:
        """Launch what backward did not reach, in the order that all ranks share."""
        self._refuse_after_failure()
        if not self._round_open:
            return
        self._round_open = False
        self.sending.close_round()
        if self._late:
            # They cost a second average each, which would meet another bucket's on ranks that have
            # none; those ranks do not answer here.
            self._watcher.agree("gradients that came late", [str(i) for i in sorted(self._late)])
        with torch.no_grad():
            for index in self.policy.plan.launch_order:
                bucket = self.buckets[index]
                if not bucket.launched:
                    bucket.fill_rest()
                    self.sending.complete(bucket)
            for index in self.policy.plan.launch_order:
                if index in self._late:  # average it once more
                    self.buckets[index].reset()
                    self.buckets[index].fill_rest()
                    self.sending.again(self.buckets[index])
            self._sparse.average()
            for bucket in self.buckets:
                # A rank that produced no gradient cannot promise one: it may turn out to be None.
                if not bucket.everywhere_used:
                    bucket.settle()

    def abandon_round(self) -> None:
        """Backward raised. What it has launched is under way, on the other ranks too."""
        self._failed = self._failed or self._round_open
        self._round_open = False
        self.sending.close_round()

    def _refuse_after_failure(self) -> None:
        if self._failed:
            raise TrainingError(
                "the last backward ended with an exception half-way, so this rank may be out of "
                "step with the others",
                hint="leave the context and enter it again, on all ranks",
            )

    def open_round(self) -> None:
        """A backward has begun to accumulate; harmless when that is known."""
        self._refuse_after_failure()
        if self._round_open:
            return
        self._round_open = True
        self._fired.clear()
        self._late.clear()
        self._stale = {id(p) for bucket in self.buckets for p in bucket.due}
        for bucket, planned in zip(self.buckets, self.policy.plan.buckets, strict=True):
            bucket.reset()
            bucket.lane = planned.lane  # not before: what was under way is waited for there
        self.sending.open_round(self.policy, self.trace)
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_gradient(self, parameter: Parameter) -> None:
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self._take_in(parameter)
        else:
            self._take_in(parameter)

    def _take_in(self, parameter: Parameter) -> None:
        name = self._names[parameter]
        if isinstance(parameter, PendingParameter):
            raise stale(name)
        if not self.enabled:
            return
        if not self._round_open:
            self.open_round()
        if id(parameter) in self._stale:
            raise stale(name)
        self._check(parameter, name)
        self._fired[name] = fired = self._fired.get(name, 0) + 1
        bucket, index = self.place[parameter]
        if self.learning:
            self._learn(name)
            bucket.fill(index)  # now, or until the round closes there are two copies of all
        elif bucket.launched:
            self._late.add(bucket.index)
        elif fired >= self.firings.get(name, 1) and bucket.fill(index):
            self.sending.complete(bucket)

    def _check(self, parameter: Parameter, name: str) -> None:
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, Promise):
            return
        if gradient.layout != torch.strided:
            raise ModelRefused(
                f"the gradient of {name} is not a dense tensor",
                hint="use nn.Embedding(sparse=True) or dense gradients under tlsched.schedule()",
            )
        view = self.place[parameter][0].flat
        if gradient.dtype != view.dtype or gradient.device != view.device:
            raise ModelRefused(
                f"{name} was {view.dtype} on {view.device} and its gradient is {gradient.dtype} "
                f"on {gradient.device}",
                hint="convert or move the model before the context, not inside it",
            )
        if gradient.requires_grad:
            self._watcher.say(
                "gradients of gradients are not averaged: what is computed from p.grad after "
                "backward(create_graph=True) belongs to this rank only"
            )

    @property
    def round_open(self) -> bool:
        """Whether a backward has begun and is not closed."""
        return self._round_open

    def _on_backward_end(self) -> None:
        # Reentrant checkpointing runs a backward inside a backward node; only the outermost closes.
        if torch._C._current_autograd_node() is None:
            self.close_round()
            self._watcher.after_backward()

    def _learn(self, name: str) -> None:
        self.firings[name] = max(self.firings.get(name, 1), self._fired[name])
        if name in self.ready_order:
            self.ready_order.remove(name)
        self.ready_order.append(name)

    def _wait(self, bucket: Bucket, work: Running) -> None:
        try:
            work.wait(self._timeout_s)
        except RuntimeError as error:
            what = f"averaging bucket {bucket.index} ({bucket.names[0]}, …) on lane {bucket.lane}"
            raise self._lanes[bucket.lane].failure(what, error) from error
