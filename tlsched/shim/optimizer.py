"""The user's own optimizer, bucket by bucket, when the bucket's gradients are there.

step() only notes the hyper-parameters and returns. The update of a bucket is the optimizer's own
step() on a shallow copy of it, whose parameter groups hold this bucket's parameters and whose state
is the original's, so that whatever the optimizer does, it does it here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tlsched.errors import ModelRefused
from tlsched.shim import pending
from tlsched.shim.bucket import Bucket
from tlsched.shim.memory import storage_uses
from tlsched.shim.separable import Group, Separability, hyperparameters, run_part, snapshot

# (group number, parameter, index in the bucket)
_Member = tuple[int, Parameter, int]
# (group number, parameter, its gradient)
_Due = tuple[int, Parameter, torch.Tensor]

READ_BEFORE = "its gradients were read before step()"
UNUSED = "some of its parameters got no gradient on this rank"
ASSIGNED = "p.grad was assigned between backward and step"
ALIASED = "somebody keeps a view of a parameter (p.data, detach(), state_dict())"
# One view is the storage's own, one is the question's.
_OWN_USES = 2


class Context(Protocol):
    """What an optimizer needs of the training context."""

    @property
    def place(self) -> Mapping[Parameter, tuple[Bucket, int]]:
        """Each parameter's bucket, and its index there."""

    def before_step(self) -> None:
        """step() was called: close the round."""

    def after_step(self, optimizer: DeferredOptimizer) -> None:
        """What was left due may be done now."""

    def outside_buckets(self, parameter: Parameter) -> None:
        """step() updates a parameter that is in no bucket; may refuse it."""

    def flush(self) -> None:
        """Wait for every gradient and do every update that is due."""

    def say(self, text: str) -> None:
        """Tell the user once."""

    @property
    def learning(self) -> bool:
        """Whether all is synchronous still."""


class DeferredOptimizer:
    """Stands in ``optimizer.step`` while a context is open."""

    def __init__(self, optimizer: Optimizer, context: Context) -> None:
        self.optimizer = optimizer
        self.separability = Separability(optimizer)
        self._context = context
        self._route_of: tuple[Any, tuple[int, ...]] | None = None
        self._route: dict[Bucket, list[_Member]] = {}
        self._outside: list[tuple[int, Parameter]] = []
        self._had_step = optimizer.__dict__.get("step")
        self._replaced = self._had_step is not None and not hasattr(
            self._had_step, "_wrapped_by_lr_sched"
        )
        self._original_step = optimizer.step
        self._active = True
        self._step = types.MethodType(self._as_method(), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]  # that is the point
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        ]

    def close(self) -> None:
        """Give the optimizer its own step() back, also where a scheduler wrapped ours meanwhile."""
        self._active = False
        for hook in self._hooks:
            hook.remove()
        if self.optimizer.__dict__.get("step") is self._step:
            if self._had_step is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._had_step  # type: ignore[method-assign]  # as it was

    def parameter_ids(self) -> tuple[int, ...]:
        """Identities of all parameters, in order: they change when a group is added."""
        return tuple(id(p) for group in self.optimizer.param_groups for p in group["params"])

    def why_at_once(self) -> str | None:
        """Why the update cannot be left for later, or None when it can."""
        if self.optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            return "a step post-hook may look at the parameters"
        if getattr(self.optimizer, "found_inf", None) is not None:
            return "GradScaler hands its scale to a fused optimizer for the length of step() only"
        return None

    def _before_load(self, _optimizer: Optimizer, _state: Any) -> None:
        self._context.flush()

    def _as_method(self) -> Callable[..., Any]:
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return self._original_step(*args, **kwargs)
            return self._request(*args, **kwargs)

        # Schedulers look for it; they need not wrap step() to see that it was called.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # their own mark
        return step

    def _request(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers look for it
        whole = self.separability.why_whole
        if self._replaced:
            whole = "somebody put a step() of his own on the optimizer"
        closure = kwargs["closure"] if len(kwargs) == 1 and "closure" in kwargs else None
        if len(args) == 1 and not kwargs and (args[0] is None or callable(args[0])):
            closure = args[0]
        elif args or (kwargs and "closure" not in kwargs) or len(kwargs) > 1:
            whole = whole or "step() was called with arguments of the optimizer's own"
        if whole is None and closure is not None and self.separability.foreign:
            whole = "what a foreign optimizer does with a closure is its own matter"
        if whole is None and any(g.get("differentiable") for g in self.optimizer.param_groups):
            whole = "the optimizer is differentiable"
        if whole is None:
            return self._in_parts(closure)
        self._context.say(f"step() waits for all gradients: {whole}")
        self._before_whole()
        result = self._whole(args, kwargs)
        self._context.after_step(self)
        return result

    def _in_parts(self, closure: Callable[[], Any] | None) -> Any:
        optimizer = self.optimizer
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._context.before_step()
        for pre_hook in (
            *_global_optimizer_pre_hooks.values(),
            *optimizer._optimizer_step_pre_hooks.values(),
        ):
            pre_hook(optimizer, (optimizer,), {})
        if self.separability.unknown:
            with self._plain_gradients():
                self.separability.step_both_ways(self._one_by_one())
        else:
            self._leave_updates()
        self._context.after_step(self)
        for post_hook in (
            *optimizer._optimizer_step_post_hooks.values(),
            *_global_optimizer_post_hooks.values(),
        ):
            post_hook(optimizer, (optimizer,), {})
        return loss

    def _before_whole(self) -> None:
        self._context.before_step()
        self._context.flush()

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The optimizer's own step() on everything, with all averages there."""
        with self._plain_gradients():
            return self._original_step(*args, **kwargs)

    @contextmanager
    def _plain_gradients(self) -> Iterator[None]:
        """Ordinary tensors in p.grad, since what runs in C++ sees through no promise."""
        self._context.flush()
        self._find_route()
        swapped = []
        for bucket, members in self._route.items():
            for _, parameter, index in members:
                if parameter.grad is bucket.promises[index]:
                    parameter.grad = bucket.views[index]
                    swapped.append((parameter, bucket, index))
        try:
            yield
        finally:
            for parameter, bucket, index in swapped:
                if parameter.grad is bucket.views[index]:
                    parameter.grad = bucket.promises[index]

    def _one_by_one(self) -> list[list[tuple[int, Parameter]]]:
        """Each parameter that has a gradient, a part of its own: buckets may come to be any."""
        return [
            [(number, p)]
            for members in self._route.values()
            for number, p, _ in members
            if p.grad is not None
        ]

    def _find_route(self) -> None:
        """Sort the parameters by bucket, again only when they or the buckets have changed."""
        place = self._context.place
        ids = self.parameter_ids()
        if self._route_of is not None and self._route_of[0] is place and self._route_of[1] == ids:
            return
        self._route_of = (place, ids)
        self._route, self._outside = {}, []
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in place:
                    bucket, index = place[parameter]
                    self._route.setdefault(bucket, []).append((number, parameter, index))
                else:
                    self._outside.append((number, parameter))

    def _leave_updates(self) -> None:
        """Note on every bucket what its update will need; do at once what cannot be left."""
        self._find_route()
        groups = [hyperparameters(group) for group in self.optimizer.param_groups]
        part = snapshot(self.optimizer)
        for bucket, members in self._route.items():
            due: list[_Due] = []
            why = None
            if bucket.work is None:
                why = READ_BEFORE if bucket.everywhere_used else UNUSED
            for number, parameter, index in members:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient is bucket.promises[index]:
                    gradient = bucket.views[index]
                else:
                    why = ASSIGNED
                    _refuse_converted(bucket, index, gradient)
                due.append((number, parameter, gradient))
            if due:
                self._leave(bucket, functools.partial(_update, part, groups, due), due, why)
        self._update_outside(part, groups)

    def _leave(
        self, bucket: Bucket, update: Callable[[], None], due: list[_Due], why: str | None
    ) -> None:
        if why is None:
            if any(storage_uses(parameter) > _OWN_USES for _, parameter, _ in due):
                why = ALIASED
                if not self._context.learning:
                    self._context.say(f"step() waits for some gradients: {why}")
            elif not all(pending.can_be_marked(parameter) for _, parameter, _ in due):
                why = "a parameter is of a class of its own"
        if why is None:
            bucket.leave_due(update, [parameter for _, parameter, _ in due])
        else:
            bucket.at_once[why] = bucket.at_once.get(why, 0) + 1
            bucket.leave_due(update, ())
            bucket.settle()

    def _update_outside(self, part: Optimizer, groups: list[Group]) -> None:
        due: list[_Due] = []
        for number, parameter in self._outside:
            if parameter.grad is not None:
                self._context.outside_buckets(parameter)
                due.append((number, parameter, parameter.grad))
        if due:
            _update(part, groups, due)


def _refuse_converted(bucket: Bucket, index: int, gradient: torch.Tensor) -> None:
    """A conversion takes autograd's node from the parameter, and with it our hook."""
    view = bucket.flat
    if gradient.dtype != view.dtype or gradient.device != view.device:
        raise ModelRefused(
            f"{bucket.names[index]} was {view.dtype} on {view.device} and its gradient is "
            f"{gradient.dtype} on {gradient.device}",
            hint="convert or move the model before the context, not inside it",
        )


def _update(part: Optimizer, groups: list[Group], due: list[_Due]) -> None:
    """Step on the parameters of ``due`` with the gradients given there."""
    held = [parameter.grad for _, parameter, _ in due]
    members: dict[int, list[Parameter]] = {}
    try:
        for number, parameter, gradient in due:
            parameter.grad = gradient
            members.setdefault(number, []).append(parameter)
        run_part(part, [groups[number] | {"params": them} for number, them in members.items()])
    finally:
        for (_, parameter, _), gradient_now in zip(due, held, strict=True):
            parameter.grad = gradient_now
