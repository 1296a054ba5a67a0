"""The user's own optimizer, bucket by bucket, when the bucket's gradients are there.

step() only notes the hyper-parameters and returns. The update of a bucket is the optimizer's own
step() on a shallow copy of it, whose parameter groups hold this bucket's parameters and whose state
is the original's, so that whatever the optimizer does, it does it here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tlsched.errors import ModelRefused
from tlsched.shim.bucket import Bucket

# One group of an optimizer at the time of step(): its hyper-parameters, and its parameters.
Group = dict[str, Any]


class DeferredOptimizer:
    """Stands in ``optimizer.step`` while a context is open.

    ``before_step`` is called first (it closes the round); ``after_step`` last, and may settle.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        place: Callable[[], dict[Parameter, tuple[Bucket, int]]],
        before_step: Callable[[], None],
        after_step: Callable[[DeferredOptimizer], None],
    ) -> None:
        refuse_unsuitable(optimizer)
        self.optimizer = optimizer
        self._place = place
        self._before_step = before_step
        self._after_step = after_step
        self._had_step = optimizer.__dict__.get("step")
        self._original_step = optimizer.step
        self._active = True
        self._step = types.MethodType(self._as_method(), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]  # that is the point

    def close(self) -> None:
        """Give the optimizer its own step() back, also where a scheduler wrapped ours meanwhile."""
        self._active = False
        if self.optimizer.__dict__.get("step") is self._step:
            if self._had_step is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._had_step  # type: ignore[method-assign]  # as it was

    def why_at_once(self) -> str | None:
        """Why the update cannot be left for later, or None when it can."""
        if self.optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            return "a step post-hook may look at the parameters"
        if getattr(self.optimizer, "found_inf", None) is not None:
            return "GradScaler hands its scale to a fused optimizer for the length of step() only"
        return None

    def _as_method(self) -> Callable[..., Any]:
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if not self._active:
                return self._original_step(closure) if closure else self._original_step()
            return self._request(closure)

        return step

    def _request(self, closure: Callable[[], Any] | None) -> Any:
        optimizer = self.optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers look for it
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        for pre_hook in (
            *_global_optimizer_pre_hooks.values(),
            *optimizer._optimizer_step_pre_hooks.values(),
        ):
            pre_hook(optimizer, (), {})
        self._leave_updates()
        self._after_step(self)
        for post_hook in (
            *optimizer._optimizer_step_post_hooks.values(),
            *_global_optimizer_post_hooks.values(),
        ):
            post_hook(optimizer, (), {})
        return loss

    def _leave_updates(self) -> None:
        """Note on every bucket what its update will need; update the rest at once."""
        place = self._place()
        groups = [_hyperparameters(group) for group in self.optimizer.param_groups]
        due: dict[Bucket, list[list[tuple[Parameter, torch.Tensor]]]] = {}
        outside: list[list[Parameter]] = [[] for _ in groups]
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                bucket, index = place.get(parameter, (None, 0))
                if bucket is None:
                    outside[number].append(parameter)
                    continue
                if gradient is bucket.promises[index]:
                    gradient = bucket.views[index]
                entry = due.setdefault(bucket, [[] for _ in groups])
                entry[number].append((parameter, gradient))
        for bucket, members in due.items():
            bucket.updates.append(functools.partial(self._update, groups, members))
        if any(outside):
            self._run([g | {"params": p} for g, p in zip(groups, outside, strict=True) if p])

    def _update(
        self, groups: list[Group], members: list[list[tuple[Parameter, torch.Tensor]]]
    ) -> None:
        """Step on ``members`` (parameter and gradient, by group) with these gradients."""
        held = [(p, p.grad) for pairs in members for p, _ in pairs]
        try:
            for pairs in members:
                for parameter, gradient in pairs:
                    parameter.grad = gradient
            self._run(
                [
                    group | {"params": [parameter for parameter, _ in pairs]}
                    for group, pairs in zip(groups, members, strict=True)
                    if pairs
                ]
            )
        finally:
            for parameter, gradient_now in held:
                parameter.grad = gradient_now

    def _run(self, groups: list[Group]) -> None:
        part = object.__new__(type(self.optimizer))
        part.__dict__.update(self.optimizer.__dict__)
        part.param_groups = groups
        step = type(self.optimizer).step
        if getattr(step, "hooked", False):
            # torch wraps each class's step() to run the hooks; they run once a step, not a bucket.
            step = step.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps
        step(part)


def refuse_unsuitable(optimizer: Optimizer) -> None:
    """Raise ModelRefused for an optimizer that needs all parameters at once."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelRefused(
            "LBFGS evaluates the loss several times a step over all parameters at once",
            hint="use another optimizer, or DistributedDataParallel",
        )


def _hyperparameters(group: Group) -> Group:
    """The group's settings as they are now; a tensor (a learning rate) is copied."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
