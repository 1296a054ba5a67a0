"""Backwards that end badly, or in unusual places, and updates that are cut short."""

from __future__ import annotations

import types
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tlsched
from tests.training import loops, models
from tests.training.ranks import RankPool
from tlsched.errors import TrainingError


class _BadBatchError(Exception):
    pass


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loops.backward(models.loss("mlp", net, batch))
    optimizer.step()
    optimizer.zero_grad()


def _backward_raises(rank: int, _size: int, policy: str) -> str:
    torch.manual_seed(1)
    net = models.mlp()
    optimizer = models.OPTIMIZERS["sgd"](net)
    batches = models.batches("mlp", rank, 6)

    def bad(_gradient: torch.Tensor) -> None:
        raise _BadBatchError

    try:
        with tlsched.schedule(net, optimizer, policy=policy):
            for batch in batches[:4]:
                _step(net, optimizer, batch)
            hook = next(net.parameters()).register_hook(bad)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            with suppress(_BadBatchError):
                loops.backward(models.loss("mlp", net, batches[4]))
            hook.remove()
            optimizer.zero_grad()
            _step(net, optimizer, batches[5])
    except TrainingError as error:
        return str(error)
    return "trained on"


def test_a_backward_that_raised_is_not_trained_upon(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_backward_raises, "kernel"):
        assert "ended with an exception half-way" in message


def _unaveraged_backward_raises(rank: int, _size: int) -> models.Tensors:
    """Under no_sync() nothing was launched, so nothing is out of step."""
    torch.manual_seed(1)
    net = models.mlp()
    optimizer = models.OPTIMIZERS["sgd"](net)
    batches = models.batches("mlp", rank, 6)

    def bad(_gradient: torch.Tensor) -> None:
        raise _BadBatchError

    with tlsched.schedule(net, optimizer) as run:
        for batch in batches[:4]:
            _step(net, optimizer, batch)
        hook = next(net.parameters()).register_hook(bad)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with run.no_sync(), suppress(_BadBatchError):
            loops.backward(models.loss("mlp", net, batches[4]))
        hook.remove()
        optimizer.zero_grad()
        _step(net, optimizer, batches[5])
    return models.parameters(net)


def test_a_local_backward_that_raised_can_be_dropped(two_ranks: RankPool) -> None:
    a, b = two_ranks.run(_unaveraged_backward_raises)
    assert models.identical(a, b)


class WhollyCheckpointed(nn.Module):
    """Every parameter's gradient comes from a backward nested in the outer one."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body = models.mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The body, recomputed in backward."""
        result: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return result


def _wholly_checkpointed(
    rank: int, _size: int, policy: str, reentrant: bool
) -> tuple[list[float], models.Tensors]:
    torch.manual_seed(1)
    net = WhollyCheckpointed(reentrant=reentrant)
    optimizer = models.OPTIMIZERS["sgd"](net)
    norms = []
    with tlsched.schedule(net, optimizer, policy=policy):
        for x, y in models.batches("mlp", rank, 6):
            loss = nn.functional.cross_entropy(net(x.requires_grad_()), y)
            loops.backward(loss)
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, models.parameters(net)


def test_a_wholly_checkpointed_model_sees_averages_after_backward(two_ranks: RankPool) -> None:
    plain = two_ranks.run(_wholly_checkpointed, "sync", False)
    nested = two_ranks.run(_wholly_checkpointed, "kernel", True)
    for norms, parameters in nested:
        assert norms == plain[0][0]
        assert models.identical(parameters, plain[0][1])


def _own_step(_rank: int, _size: int) -> int:
    warnings.simplefilter("ignore")  # that step() waits is said
    net = models.mlp()
    optimizer = models.OPTIMIZERS["sgd"](net)
    original = optimizer.step
    calls = []

    def step(_self: torch.optim.Optimizer, *args: Any) -> Any:
        calls.append(args)
        return original(*args)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]  # as users do
    with tlsched.schedule(net, optimizer):
        for batch in models.batches("mlp", 0, 5):
            _step(net, optimizer, batch)
    return len(calls)


def test_a_step_that_the_user_put_on_the_optimizer_is_the_one_called(two_ranks: RankPool) -> None:
    assert two_ranks.run(_own_step) == [5, 5]


def _update_is_cut_short(rank: int, _size: int) -> list[str]:
    net = models.mlp()
    optimizer = models.OPTIMIZERS["sgd"](net)
    batches = models.batches("mlp", rank, 5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with suppress(KeyboardInterrupt), tlsched.schedule(net, optimizer) as run:
            for batch in batches[:4]:
                _step(net, optimizer, batch)

            def interrupt() -> None:
                raise KeyboardInterrupt

            run._opened().gradients.buckets[0].updates.append(interrupt)
            net(batches[4][0])
    return [str(warning.message) for warning in said]


def test_an_update_that_was_cut_short_is_said(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_update_is_cut_short):
        assert any("parameters are not consistent" in text for text in said)


class WithSparse(nn.Module):
    """A sparse embedding and a head that is unfrozen in mid-training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.WORDS, models.WIDTH, sparse=True)
        self.head = nn.Linear(models.WIDTH, models.WORDS)
        self.head.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next word at each place."""
        result: torch.Tensor = self.head(self.embed(tokens))
        return result


def _sparse_after_joining(rank: int, _size: int) -> models.Tensors:
    warnings.simplefilter("ignore")  # joining is said
    torch.manual_seed(1)
    net = WithSparse()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tlsched.schedule(net, optimizer):
        for number, batch in enumerate(models.batches("tied", rank, 9)):
            if number == 4:
                net.head.bias.requires_grad_(True)
            if number == 8:  # a backward that reaches the embedding only
                loops.backward(net.embed(batch).square().mean())
            else:
                loops.backward(models.loss("tied", net, batch))
            optimizer.step()
            optimizer.zero_grad()
    return models.parameters(net)


def test_sparse_gradients_are_averaged_after_a_parameter_joined(two_ranks: RankPool) -> None:
    a, b = two_ranks.run(_sparse_after_joining)
    assert models.identical(a, b)
