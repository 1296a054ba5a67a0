"""Buckets handed over in pieces, each when the policy says so: as buckets complete and pieces end.

That a piece has ended is heard in a thread of gloo's, an order of rank 0 in the thread that reads
it, and a complete bucket where backward runs. Each of them leaves an event, and whoever finds
nobody at work does all that is there; so nobody waits for another, nothing polls, and the policy
and the lane see one thing after another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tlsched.errors import TrainingError
from tlsched.planning.policies import Policy, Send
from tlsched.planning.policies.bytescheduler import ByteScheduler, Following
from tlsched.shim.bucket import Bucket
from tlsched.shim.lane import AnyLane
from tlsched.shim.orders import Follower, Leader, Order, OrdersLost
from tlsched.shim.reduction import SLICE_S, Running
from tlsched.shim.sending import Sending, WholeBuckets
from tlsched.shim.trace import Trace

Event = Callable[[], list[Send]]


def make_sending(
    policy: Policy,
    buckets: Sequence[Bucket],
    lanes: Sequence[AnyLane],
    orders: Leader | Follower | None,
) -> Sending:
    """What policies of this kind need; ``orders`` where rank 0 dictates."""
    return Pieces(buckets, lanes, orders) if policy.pieces else WholeBuckets(buckets, lanes)


class Pieces:
    """Hands pieces over as the policy says, or rank 0 where ``orders`` come from it.

    ``failure`` is what ended it: gloo's error, or that orders cannot be passed on.
    """

    _policy: Policy
    _trace: Trace | None

    def __init__(
        self, buckets: Sequence[Bucket], lanes: Sequence[AnyLane], orders: Leader | Follower | None
    ) -> None:
        self.failure: Exception | None = None
        self.backward_runs = False
        self._orders = orders
        self._buckets = buckets
        self._lanes = lanes
        self._assemblies: dict[int, Assembly] = {}
        self._events: deque[Event] = deque()
        self._at_work = threading.Lock()
        self._stopped = False

    def open_round(self, policy: Policy, trace: Trace | None) -> None:
        """See :class:`~tlsched.shim.sending.Sending`."""
        orders = self._orders
        with self._at_work:
            self._assemblies = {}
            self._trace = trace
            self._policy = Following(policy.plan) if isinstance(orders, Follower) else policy
            if isinstance(orders, Leader):
                orders.begin_round()
                if orders.tuning is not None and isinstance(self._policy, ByteScheduler):
                    self._policy.use(orders.tuning.round_began(time.perf_counter()))
            self._policy.start_round()
        self.backward_runs = True
        if isinstance(orders, Follower):
            orders.begin_round(self._on_order, self._on_loss)

    def complete(self, bucket: Bucket) -> None:
        """See :class:`~tlsched.shim.sending.Sending`."""
        assembly = Assembly(self, self._lanes[bucket.lane])
        bucket.launch(assembly.take)
        self._assemblies[bucket.index] = assembly
        if self._trace is not None:
            self._trace.ready(bucket.index)
            self._trace.launched(bucket.index, assembly.get_future())
        self._leave(partial(self._policy.complete, bucket.index))

    def close_round(self) -> None:
        """See :class:`~tlsched.shim.sending.Sending`."""
        self.backward_runs = False

    def again(self, bucket: Bucket) -> None:
        """See :class:`~tlsched.shim.sending.Sending`."""
        for other in self._buckets:
            other.settle()
        bucket.launch(self._lanes[bucket.lane].all_reduce)

    def stop(self) -> None:
        """See :class:`~tlsched.shim.sending.Sending`."""
        self._stopped = True
        with self._at_work:  # whoever was at work is done
            self._events.clear()

    def fail(self, error: Exception) -> None:
        """End all waits: nothing more will come."""
        # Without frames: they would keep a lane's group alive.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.failure = self.failure or error
        for assembly in list(self._assemblies.values()):
            assembly.finish()

    def _leave(self, event: Event) -> None:
        """Have ``event`` done, by this thread or by the one that is at work."""
        self._events.append(event)
        while self._events and self._at_work.acquire(blocking=False):
            try:
                self._work()
            except BaseException as error:
                self.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))
                if not isinstance(error, Exception):  # Ctrl-C, which is the user's loop's to see
                    raise
            finally:
                self._at_work.release()

    def _work(self) -> None:
        while self._events:
            sends: list[Send] = []
            while self._events:
                event = self._events.popleft()
                if self.failure is None and not self._stopped:
                    sends += event()
            self._tell(sends)
            for send in sends:
                reduction = self._assemblies[send.bucket].start(send)
                # Called at once, in this thread, where the piece has arrived already.
                reduction.get_future().add_done_callback(partial(self._on_end, send))

    def _tell(self, sends: Sequence[Send]) -> None:
        """Before they are started here, since the others wait for it."""
        if sends and isinstance(self._orders, Leader) and isinstance(self._policy, ByteScheduler):
            partition_bytes = self._policy.window.partition_bytes
            self._orders.tell(partition_bytes, [send.bucket for send in sends])

    def _on_end(self, send: Send, future: torch.futures.Future[object]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            self.fail(error)
        else:
            self._leave(partial(self._ended, send))

    def _ended(self, send: Send) -> list[Send]:
        sends = self._policy.sent(send)
        self._assemblies[send.bucket].ended(send)
        return sends

    def _on_order(self, order: Order) -> None:
        assert isinstance(self._policy, Following)
        self._leave(partial(self._policy.told, order.partition_bytes, order.buckets))

    def _on_loss(self) -> None:
        self._leave(self._lost)

    def _lost(self) -> list[Send]:
        assert isinstance(self._policy, Following)
        if not self._policy.told_all:
            raise OrdersLost(0)
        return []


class Assembly:
    """One bucket's pieces under way: what a Reduction is to a whole bucket."""

    __slots__ = (
        "_done",
        "_future",
        "_lane",
        "_left",
        "_pieces",
        "_reductions",
        "_started_s",
        "_wire",
    )

    def __init__(self, pieces: Pieces, lane: AnyLane) -> None:
        self._pieces = pieces
        self._lane = lane
        self._done = threading.Event()
        self._reductions: list[Running] = []
        self._future: torch.futures.Future[object] | None = None
        self._started_s = time.monotonic()

    def take(self, wire: torch.Tensor) -> Assembly:
        """``wire`` is the bucket's memory, flags and padding included."""
        self._wire = wire
        self._left = wire.numel()
        return self

    def start(self, send: Send) -> Running:
        """Hand the piece over. The last one has what lies behind the gradients as well."""
        reduction = self._lane.all_reduce(self._wire[self._slice(send)])
        self._reductions.append(reduction)
        return reduction

    def ended(self, send: Send) -> None:
        """The piece has arrived."""
        where = self._slice(send)
        self._left -= where.stop - where.start
        if not self._left:
            self.finish()

    def finish(self) -> None:
        """All have arrived, or none will."""
        self._done.set()
        if self._future is not None:
            with contextlib.suppress(RuntimeError):  # it is done, if two threads end it at once
                self._future.set_result(None)

    def wait(self, timeout_s: float) -> None:
        """As :meth:`Running.wait`. Raises TrainingError while backward runs on this thread.

        Then pieces may be held back until other buckets are complete, which they would never be.
        """
        if self._pieces.backward_runs:
            raise TrainingError(
                "an average is asked for in the middle of backward, where this policy has none",
                hint='read p.grad after backward(), or use policy="kernel"',
            )
        end_s = time.monotonic() + timeout_s
        broken: str | None = None
        told = False
        while not self._done.wait(SLICE_S):
            if broken is not None:
                self._pieces.fail(RuntimeError(broken))
                break
            broken = self._lane.broken()
            now_s = time.monotonic()
            if now_s > end_s:
                raise RuntimeError(f"Timed out waiting {timeout_s:g} s")
            if not told and now_s > self._started_s + timeout_s / 2:
                told = True
                self._lane.roster.still_waiting()
        self._raise_failure()
        for reduction in self._reductions:
            reduction.wait(timeout_s)  # they have ended; this lets go of them
        self._reductions.clear()

    def ends_within(self, seconds: float) -> bool:
        """See :meth:`Running.ends_within`."""
        return self._done.wait(seconds) and self._pieces.failure is None

    def get_future(self) -> torch.futures.Future[object]:
        """Completes with the last piece. Only before any has been handed over."""
        self._future = torch.futures.Future()
        return self._future

    def _raise_failure(self) -> None:
        failure = self._pieces.failure
        if failure is None or not self._left:
            return
        if isinstance(failure, OrdersLost):
            raise failure.told(self._lane.roster)
        if isinstance(failure, RuntimeError):
            raise RuntimeError(str(failure))
        raise failure

    def _slice(self, send: Send) -> slice:
        size = self._wire.element_size()
        stop = self._wire.numel() if send.stop is None else send.stop // size
        return slice(send.start // size, stop)
