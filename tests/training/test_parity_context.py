"""What DistributedDataParallel's own tests promise of the wrapper itself: states, groups, tools."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tlsched
from tests.training import compare, models
from tests.training.compare import Outcome, hold, outcome, trainer
from tests.training.loops import backward
from tests.training.ranks import RankPool


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Shape in, shape out."""
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
        """Always fails."""
        raise RuntimeError("meant to fail")


class Three(nn.Module):
    """Fails in the middle of backward, or after all of it, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        """Shape (rows, 16) to (rows, 4); the middle layer is left out when it fails."""
        x = self.first(x)
        x = Failing.apply(x) if fails else self.second(x)  # type: ignore[no-untyped-call]  # torch
        result: torch.Tensor = self.last(x)
        return result


def _train_in(net: nn.Module, group: Any, rank: int, ranks: list[int]) -> None:
    """A context over ``ranks`` that a failing backward ends."""
    with pytest.raises(RuntimeError, match="meant to fail"):
        _train_and_fail(net, group, rank, ranks)
    for p in net.parameters():
        p.grad = None


def _train_and_fail(net: nn.Module, group: Any, rank: int, ranks: list[int]) -> None:
    """Five steps, equal to those of one process with all batches, then the failure."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with tlsched.schedule(net, optimizer, process_group=group, timeout_s=30):
        alone = copy.deepcopy(net)
        other = torch.optim.SGD(alone.parameters(), lr=0.05)
        of_all = zip(*(compare.data(r, 5) for r in ranks), strict=True)
        for x, xs in zip(compare.data(rank, 5), of_all, strict=True):
            backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            backward(alone(torch.cat(xs)).square().mean())
            other.step()
            other.zero_grad()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.clone(), q, rtol=1e-5, atol=1e-6)
        backward(net(compare.data(rank, 1)[0], fails=True).sum())


def _regrouped(rank: int, size: int) -> models.Tensors:
    torch.manual_seed(3)
    net = Three()
    everyone = list(range(size))
    for ranks in (everyone, [0, 1], [1, 2, 3], everyone):
        group = dist.new_group(ranks)
        if rank in ranks:
            _train_in(net, group, rank, ranks)
    return models.parameters(net)


def test_one_model_goes_from_group_to_group_with_failures_between(four_ranks: RankPool) -> None:
    first, *others = four_ranks.run(_regrouped)
    assert all(models.identical(first, other) for other in others)


def _restarted(rank: int, size: int, folder: str) -> models.Tensors:
    """The job ends and begins anew with one rank less, then with all."""
    torch.manual_seed(3)
    net = Three()
    _train_in(net, None, rank, list(range(size)))
    dist.destroy_process_group()
    if rank > 0:
        _begin(f"{folder}/smaller", rank - 1, size - 1)
        _train_in(net, None, rank, list(range(1, size)))
        dist.destroy_process_group()
    _begin(f"{folder}/whole", rank, size)
    _train_in(net, None, rank, list(range(size)))
    return models.parameters(net)


def _begin(path: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)


def test_one_model_goes_on_in_a_default_group_of_another_size(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    first, *others = four_ranks.run(_restarted, str(tmp_path))
    assert all(models.identical(first, other) for other in others)


def _mesh(rank: int, size: int) -> models.Tensors:
    torch.manual_seed(3)
    net = Three()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    ranks = [r for r in range(size) if r // 2 == rank // 2]
    _train_in(net, mesh.get_group("inner"), rank, ranks)
    return models.parameters(net)


def test_the_group_of_a_device_mesh(four_ranks: RankPool) -> None:
    a, b, c, d = four_ranks.run(_mesh)
    assert models.identical(a, b)
    assert models.identical(c, d)
    assert not models.identical(a, c)


def _average(rank: int, size: int) -> list[float]:
    net = nn.Linear(1, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    group = dist.new_group(list(range(size)))
    seen = []
    with tlsched.schedule(net, optimizer, process_group=group):
        for number in range(100):
            if net.weight.grad is not None:
                net.weight.grad.requires_grad_(False)
                net.weight.grad.zero_()
            net(torch.tensor([float(rank + number)])).sum().backward()
            assert net.weight.grad is not None
            seen.append(net.weight.grad[0, 0].item() - number)
            optimizer.step()
    return seen


def test_the_average_over_a_given_group_is_there_when_backward_returns(
    four_ranks: RankPool,
) -> None:
    assert four_ranks.run(_average) == [[1.5] * 100] * 4


def _states(rank: int, _size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    net[1].running_mean.normal_()  # type: ignore[operator]  # a BatchNorm
    before = [t.clone() for t in net.state_dict().values()]
    with tlsched.schedule(net, torch.optim.SGD(net.parameters(), lr=0.1)):
        return before, [t.clone() for t in net.state_dict().values()]


def test_every_rank_begins_with_the_states_of_rank_0(four_ranks: RankPool) -> None:
    results = four_ranks.run(_states)
    for before, after in results:
        assert models.identical(after, results[0][0])
        assert before is results[0][0] or not models.identical(before, after)


def _names(rank: int, _size: int) -> list[list[str]]:
    net = Three()
    net.second.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    with tlsched.schedule(net, optimizer) as run:
        for x in compare.data(rank):
            net(x).square().mean().backward()
            optimizer.step()
            seen.append(sorted(name for bucket in run.plan.buckets for name in bucket.names))
    return [sorted(n for n, p in net.named_parameters() if p.requires_grad), *seen]


def test_the_plan_names_each_trained_parameter_once_and_no_other(two_ranks: RankPool) -> None:
    for expected, *seen in two_ranks.run(_names):
        assert "second.bias" not in expected
        assert all(names == expected for names in seen)


def _profiled(rank: int, _size: int, policy: str, which: str) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer(policy, rank, net, optimizer) as t:
        for number, x in enumerate(compare.data(rank)):
            profiler: Any = contextlib.nullcontext()
            if number in (2, 5):
                profiler = (
                    torch.autograd.profiler.profile()
                    if which == "autograd"
                    else torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                )
            with profiler as seen:
                t.forward(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                t.flush()
            if seen is not None and t.run is not None:
                counts = {e.key: e.count for e in seen.key_averages()}
                assert counts["gloo:all_reduce"] == len(t.run.plan.buckets), counts
    return outcome(net)


@pytest.mark.parametrize("which", ["autograd", "torch"])
def test_profilers_count_one_all_reduce_a_bucket(two_ranks: RankPool, which: str) -> None:
    hold(two_ranks, _profiled, which)


def _autocast(rank: int, _size: int, policy: str, none: bool) -> Outcome:
    torch.manual_seed(3)
    net = compare.mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trainer(policy, rank, net, optimizer) as t:
        for x in compare.data(rank):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = t.forward(x)
                assert result.dtype == torch.bfloat16
                loss = result.square().mean()
            loss.backward()
            assert all(p.grad.dtype == p.dtype == torch.float32 for p in net.parameters())
            t.log.append([p.grad.clone() for p in net.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)
    return outcome(net, t.log)


@pytest.mark.parametrize("none", [True, False], ids=["none", "zeros"])
def test_autocast_keeps_parameters_and_averages_in_float32(two_ranks: RankPool, none: bool) -> None:
    hold(two_ranks, _autocast, none)
