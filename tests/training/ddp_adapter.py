"""Runs bodies of torch's own tests of DistributedDataParallel on tlsched, on the CPU.

The bodies are torch's, called where torch ships them. What they use is replaced while they run:
DistributedDataParallel by :class:`Scheduled`, devices by the CPU, SyncBatchNorm (whose kernels
exist for GPUs only) by :class:`SyncBatchNormOnCpu`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import tlsched
from tlsched.errors import ModelRefused

_open: list[Scheduled] = []


class Scheduled(nn.Module):
    """Stands where a test writes DistributedDataParallel: ``module`` in a context of its own.

    DistributedDataParallel knows no optimizer. Here it is one that changes nothing (a rate of
    zero), stepped before each forward that follows a backward, so that tlsched leaves its learning
    and overlaps; :meth:`apply_gradients` does what torch's tests do by hand.
    """

    def __init__(
        self,
        module: nn.Module,
        *_ignored: Any,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool = True,
        **_of_no_meaning_here: Any,
    ) -> None:
        super().__init__()
        self.module = module
        if broadcast_buffers is not None:
            forward_sync_buffers = broadcast_buffers
        self.forward_sync_buffers = forward_sync_buffers
        self._join_config = SimpleNamespace(enable=False)
        self._enter(process_group)

    def _enter(self, process_group: dist.ProcessGroup | None) -> None:
        mine = {id(p) for p in self.module.parameters()}
        for other in [*_open]:
            if mine & {id(p) for p in other.module.parameters()}:
                other.close()  # a test is done with it, and never says so
        # A model without parameters: tlsched, and not the optimizer, is to refuse it.
        parameters = list(self.module.parameters()) or [nn.Parameter(torch.zeros(1))]
        self.optimizer = torch.optim.SGD(parameters, lr=0.0)
        try:
            self.run = tlsched.schedule(
                self.module,
                self.optimizer,
                process_group=process_group,
                broadcast_buffers=self.forward_sync_buffers,
                timeout_s=30,
            )
        except ModelRefused as error:
            raise RuntimeError(str(error)) from error  # the type that DDP raises
        self.run.__enter__()
        self._stepped = 0
        _open.append(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        backwards = self._backwards()
        if backwards != self._stepped:
            self._stepped = backwards
            self.optimizer.step()
        return self.module(*args, **kwargs)

    def apply_gradients(self, *, set_to_none: bool) -> None:
        """Add each gradient to its parameter, by a step() with a rate that holds for it only."""
        self.optimizer.param_groups[0]["lr"] = -1.0
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = 0.0
        self._stepped = self._backwards()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def join(self, *, enable: bool) -> contextlib.AbstractContextManager[None]:
        """Only what tlsched has: no uneven inputs."""
        assert not enable
        return contextlib.nullcontext()

    def close(self) -> None:
        """Leave the context."""
        _open.remove(self)
        self.run.__exit__(None, None, None)

    def _backwards(self) -> int:
        engine = self.run._engine
        assert engine is not None
        return engine.backwards

    # Names of DistributedDataParallel's that the bodies use.

    def _remove_autograd_hooks(self) -> None:
        """Called after a backward that raised; with tlsched that exception leaves the context."""
        _open.remove(self)
        failure = RuntimeError("backward raised")
        self.run.__exit__(RuntimeError, failure, None)

    def _set_static_graph(self) -> None: ...

    def _set_ddp_sink_clone(self, _clone: bool) -> None: ...

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["run"], state["optimizer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._enter(None)


class SyncBatchNormOnCpu(nn.SyncBatchNorm):
    """Batch statistics over all ranks, out of torch's differentiable collectives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, channels, …), any float type; computes in float64."""
        if not self.training:
            training = self.running_mean is None
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, training,
                0.0, self.eps,
            )  # fmt: skip
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.double()
        count = _summed(torch.tensor(float(x.numel() // x.shape[1]), dtype=torch.float64))
        mean = _summed(wide.sum(dims)) / count
        centred = wide - mean.view(shape)
        variance = _summed(centred.square().sum(dims)) / count
        with torch.no_grad():
            if self.running_mean is not None and self.running_var is not None:
                assert self.momentum is not None
                unbiased = variance * count / (count - 1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        result = centred / (variance + self.eps).sqrt().view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(x.dtype)


class _Summed(torch.autograd.Function):
    """The sum over all ranks, whose gradient is the sum over all ranks."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _summed(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Summed.apply(x)  # type: ignore[no-untyped-call]  # torch leaves it
    return result


class _OnCpu(TorchFunctionMode):
    """Every device that a body asks for is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device:
            return torch.device("cpu")
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or (
        isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    )


def _module_to(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    args = tuple("cpu" if _is_gpu(a) else a for a in args)
    return original(module, *args, **kwargs)


@contextlib.contextmanager
def _replaced(theirs: Any) -> Iterator[None]:
    to = nn.Module.to
    with pytest.MonkeyPatch.context() as patch, _OnCpu():
        patch.setattr(nn.parallel, "DistributedDataParallel", Scheduled)
        patch.setattr(theirs, "DistributedDataParallel", Scheduled)
        patch.setattr(theirs, "GradScaler", functools.partial(torch.amp.GradScaler, "cpu"))
        patch.setattr(theirs, "autocast", functools.partial(torch.autocast, "cpu"))
        patch.setattr(theirs, "init_multigpu_helper", lambda size, _: {i: [i] for i in range(size)})
        patch.setattr(nn, "SyncBatchNorm", SyncBatchNormOnCpu)
        patch.setattr(nn.Module, "cuda", lambda module, *_: module)
        patch.setattr(nn.Module, "to", lambda m, *args, **kw: _module_to(to, m, *args, **kw))
        for name in ("set_device", "manual_seed", "synchronize"):
            patch.setattr(torch.cuda, name, lambda *_, **__: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        yield


def run_body(rank: int, size: int, name: str) -> list[str]:
    """Body for a rank: torch's test ``name``. Returns the policies that were in use at its end."""
    os.environ["BACKEND"] = "gloo"  # read where torch's file is imported
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test as theirs

    class Subject(theirs.DistributedTest._DistTestBase, TestCase):
        """What the bodies call ``self``."""

        rank: int
        world_size: int

        def runTest(self) -> None:  # noqa: N802  # unittest's name
            """unittest wants one."""

        def _barrier(self, *_: Any, **__: Any) -> None:
            dist.barrier()

        def _model_step(self, model: nn.Module) -> None:
            if isinstance(model, Scheduled):
                model.apply_gradients(set_to_none=True)
            else:
                super()._model_step(model)  # type: ignore[no-untyped-call]  # torch

        def _model_step_with_zero_grad(self, model: nn.Module) -> None:
            if isinstance(model, Scheduled):
                model.apply_gradients(set_to_none=False)
            else:
                super()._model_step_with_zero_grad(model)  # type: ignore[no-untyped-call]  # torch

    subject: Any = Subject()  # type: ignore[no-untyped-call]  # torch
    subject.rank, subject.world_size = rank, size
    torch.manual_seed(0)
    body = inspect.unwrap(getattr(Subject, name))  # without the guards that ask for GPUs
    with _replaced(theirs):
        try:
            body(subject)
            return [scheduled.run.policy_name for scheduled in _open]
        finally:
            for scheduled in [*_open]:
                scheduled.close()
