"""Optimizers that are not torch's: tried first, and split only if that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.training import compare, models
from tests.training.compare import Outcome, Wide, hold, listening, trainer
from tests.training.ranks import RankPool


class Simple(torch.optim.Optimizer):
    """Follows the protocol: state of its own, a parameter at a time."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "power": [2, 2]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Sign descent with a memory."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["count"] = 0
                state["count"] += 1
                state["mean"].mul_(0.9).add_(p.grad ** group["power"][0] * p.grad.sign())
                p.add_(state["mean"] / state["count"], alpha=-group["lr"])
        return None


class KeepsGradient(Simple):
    """Keeps the last gradient itself, not a copy of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Difference to the gradient before."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].get("last")
                    if last is not None:
                        p.sub_(p.grad - 0.5 * last, alpha=group["lr"])
                    self.state[p]["last"] = p.grad
        return None


class Counts(Simple):
    """Changes its group in step(), as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        """The rate falls with each step."""
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.9


class Attribute(Simple):
    """Counts in an attribute."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Every other step is twice as long."""
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (1 + self.count % 2))


class GlobalNorm(Simple):
    """Scales by a norm over all parameters, as LARS-like and D-adapting ones do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Normalised descent."""
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class Noisy(Simple):
    """Draws random numbers, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Descent with noise."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])


class OwnArguments(Simple):
    """Takes an argument of its own."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        """Scaled."""
        for group in self.param_groups:
            group["lr"] *= factor
        super().step()
        for group in self.param_groups:
            group["lr"] /= factor


class Sharpness(torch.optim.Optimizer):
    """SAM: needs a closure, evaluates it, climbs, evaluates again, descends."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        """Two gradients a step."""
        with torch.enable_grad():
            loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            climbs = [p.grad * (0.05 / norm) for p in params]
            for p, climb in zip(params, climbs, strict=True):
                p.add_(climb)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, climb in zip(params, climbs, strict=True):
                p.sub_(climb)
        self.base.step()
        self.zero_grad()
        return loss


class InList(Simple):
    """Keeps its means in an attribute, by position."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.means = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Momentum, where the shape fits."""
        for p, mean in zip(self.param_groups[0]["params"], self.means, strict=False):
            if p.grad is not None and p.shape == mean.shape:
                p.sub_(mean.mul_(0.9).add_(p.grad), alpha=0.01)


class InDict(Simple):
    """Keeps its means in an attribute, by parameter."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.means: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Momentum."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                mean = self.means.setdefault(p, torch.zeros_like(p))
                p.sub_(mean.mul_(0.9).add_(p.grad), alpha=0.01)


class Wrapper(torch.optim.Optimizer):
    """Lookahead: steps with another optimizer, which knows all parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.base = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        super().__init__(self.base.param_groups, {})
        self.base.param_groups = self.param_groups

    def step(self, closure: Any = None) -> Any:
        """Half of the way that the other goes."""
        self.base.step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.copy_(slow.lerp_(p, 0.5))


class SharedCount(Simple):
    """One step count, in the state of every parameter."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        count = torch.zeros(())
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = count

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Ever shorter."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["count"] += 1
                p.sub_(p.grad / self.state[p]["count"], alpha=0.1)


_ELSEWHERE: dict[int, list[Any]] = {}


class Reaches(Simple):
    """Finds its parameters where no trial looks."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.key = id(self)
        _ELSEWHERE[self.key] = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Descent."""
        for p in _ELSEWHERE[self.key]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)


FOREIGN: dict[str, tuple[type[Any], str | None]] = {
    "simple": (Simple, None),
    "keeps the gradient": (KeepsGradient, None),
    "counts": (Counts, "Counts changes its setting 'lr'"),
    "attribute": (Attribute, "Attribute changes its attribute 'count'"),
    "global norm": (GlobalNorm, "GlobalNorm's update of a parameter depends on other"),
    "noisy": (Noisy, "Noisy changes the random generator's state"),
    "own arguments": (OwnArguments, "arguments of the optimizer's own"),
    "in a list": (InList, "InList changes its attribute 'means'"),
    "in a dict": (InDict, "InDict changes its attribute 'means'"),
    "wrapper": (Wrapper, "Wrapper keeps an object of type SGD in its attribute 'base'"),
    "shared count": (SharedCount, "SharedCount keeps one tensor in the state of several"),
    "reaches": (Reaches, "Reaches steps on parameters that are not in its groups"),
    "closure": (Sharpness, "what a foreign optimizer does with a closure"),
}


def _foreign(rank: int, _size: int, policy: str, name: str) -> Outcome:
    torch.manual_seed(3)
    net = Wide()
    optimizer = FOREIGN[name][0](net.parameters())
    with listening() as said, trainer(policy, rank, net, optimizer) as t:
        torch.manual_seed(7)
        for x in compare.data(rank):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                loss: torch.Tensor = t.forward(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return loss

            if name == "closure":
                t.log.append(optimizer.step(closure).item())
                continue
            closure()
            optimizer.step(**({"factor": 0.5} if name == "own arguments" else {}))
            optimizer.zero_grad()
        if policy != "ddp":
            assert len(t.run.report()) > 1
            t.log.clear()
    whys = [str(w.message) for w in said if "step() waits for all" in str(w.message)]
    return Outcome(models.parameters(net), [], whys)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_optimizers(two_ranks: RankPool, name: str) -> None:
    results = hold(two_ranks, _foreign, name, ddp=name != "closure", rtol=1e-5)
    why = FOREIGN[name][1]
    said = results["kernel"][0].said
    assert len(said) == (why is not None), said
    assert why is None or why in said[0]
