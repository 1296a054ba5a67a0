"""Training over parameter servers: the same bits under every policy, and all that loops may do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tlsched
from tests.training import loops, models
from tests.training.ranks import RankPool, fresh_ranks
from tests.training.serving import servers
from tests.training.test_equality import PIECES

STEPS = 14  # two to learn, seven to measure, and some with the new plan
POLICIES = ("sync", "fifo", "lanes", "kernel", "bytescheduler", "prophet")


def _train(rank: int, policy: str, options: dict[str, Any]) -> models.Tensors:
    torch.manual_seed(rank)  # ranks start apart: rank 0's parameters must win
    net = models.small_cnn()
    optimizer = models.OPTIMIZERS["sgd"](net)
    loss_of = nn.CrossEntropyLoss()
    with tlsched.schedule(net, optimizer, policy=policy, settings=PIECES, **options):
        for x, y in models.batches("cnn", rank, STEPS):
            loss_of(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return models.parameters(net)


def _train_under_each(
    rank: int, _size: int, policies: tuple[str, ...], options: dict[str, Any]
) -> list[models.Tensors]:
    return [_train(rank, policy, options) for policy in policies]


def _over(addresses: list[str]) -> dict[str, Any]:
    return {"backend": "ps", "servers": addresses, "timeout_s": 60.0}


def test_every_policy_and_number_of_servers_gives_the_same_bits(four_ranks: RankPool) -> None:
    (expected, *_) = four_ranks.run(_train_under_each, ("sync",), {})
    first: models.Tensors | None = None
    for count, policies in (
        (1, ("kernel", "sync")),
        (2, ("kernel", "bytescheduler")),
        (4, POLICIES),
    ):
        with servers(count) as started:
            options = _over([one.address for one in started])
            ranks = four_ranks.run(_train_under_each, policies, options)
        for of_rank in ranks:
            for policy, parameters in zip(policies, of_rank, strict=True):
                first = first or parameters
                assert models.identical(parameters, first), (policy, count)
    assert first is not None
    for ours, theirs in zip(first, expected[0], strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * scale)


def _train_or_serve(rank: int, _size: int, serving: int) -> Any:
    options = {"backend": "ps", "servers": serving, "timeout_s": 60.0}
    try:
        return _train(rank, "kernel", options)
    except SystemExit as end:
        return end.code


def test_last_ranks_serve_and_end_with_the_workers() -> None:
    with fresh_ranks(3) as pool:
        ours, theirs, served = pool.run(_train_or_serve, 1)
        alone = pool.run(_train_under_each, ("kernel",), {"backend": "ps"})
    assert served == 0
    assert models.identical(ours, theirs)
    assert not models.identical(ours, alone[0][0]), "three ranks average other gradients than two"


def _matrix(rank: int, size: int, model: str, loop: str) -> list[models.Tensors]:
    """DDP over gloo, and kernel over a server that the ranks start."""
    return [
        loops.train(rank, size, "ddp", model, "adamw", loop, STEPS),
        _loop_over_servers(rank, model, loop),
    ]


def _loop_over_servers(rank: int, model: str, loop: str) -> models.Tensors:
    torch.manual_seed(5)
    net = models.MODELS[model]()
    optimizer = models.OPTIMIZERS["adamw"](net)
    with tlsched.schedule(net, optimizer, backend="ps", timeout_s=60.0) as run:
        assert run.workers == 2
        setting = loops.Setting(model, net, net, optimizer, run.no_sync)
        loops.LOOPS[loop](setting, models.batches(model, rank, STEPS))
    return models.parameters(net)


@pytest.mark.parametrize(
    ("model", "loop"),
    [(model, "plain") for model in models.MODELS if model != "reentrant"]
    + [("mlp", loop) for loop in loops.LOOPS if loop != "plain"],
)
def test_models_and_loops_end_as_under_ddp(two_ranks: RankPool, model: str, loop: str) -> None:
    ranks = two_ranks.run(_matrix, model, loop)
    ddp, ours = zip(*ranks, strict=True)
    assert models.identical(*ours), "ranks diverged"
    for mine, theirs in zip(ours[0], ddp[0], strict=True):  # two terms: any order is the same sum
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6 * scale)


def _unusual(rank: int, _size: int, backend: str) -> list[Any]:
    """Sparse gradients, a parameter that joins, reads of p.grad, a flush."""
    torch.manual_seed(1)
    embedding = nn.Embedding(50, 8, sparse=True)
    net = nn.Sequential(embedding, nn.Flatten(), nn.Linear(32, 600), nn.BatchNorm1d(600))
    head = nn.Linear(600, 4).requires_grad_(False)
    net.append(head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    log: list[Any] = []
    with tlsched.schedule(net, optimizer, backend=backend, timeout_s=60.0) as run:
        for step in range(12):
            if step == 6:
                head.requires_grad_(True)
            words = torch.randint(50, (8, 4), generator=generator)
            loops.backward(net(words).square().mean())
            log.append(
                float(
                    torch.nn.utils.get_total_norm(
                        [p.grad for p in head.parameters() if p.grad is not None]
                    )
                )
            )
            optimizer.step()
            optimizer.zero_grad()
            if step == 9:
                run.flush()
    return [log, models.parameters(net), [b.clone() for b in net.buffers()]]


def test_sparse_gradients_buffers_and_joining_parameters(two_ranks: RankPool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gloo = two_ranks.run(_unusual, "gloo")
        ours = two_ranks.run(_unusual, "ps")
    for mine, theirs in zip(ours, gloo, strict=True):
        assert mine[0] == theirs[0]
        for part in (1, 2):
            assert models.identical(mine[part], theirs[part])


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def _sums(rank: int, _size: int) -> list[list[torch.Tensor]]:
    """Each rank's part and what the lanes make of it, for each dtype and awkward sizes."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    with tlsched.schedule(net, optimizer, backend="ps", policy="kernel", timeout_s=60.0) as run:
        lane = run._lanes[0]
        generator = torch.Generator().manual_seed(rank)
        for dtype in DTYPES:
            for count in (1, 1000, 300_001):
                part = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
                whole = part.clone()
                lane.all_reduce(torch.view_as_real(whole) if whole.is_complex() else whole).wait(60)
                found.append([part, whole])
    return found


def test_every_dtype_is_summed_in_the_order_of_the_ranks(four_ranks: RankPool) -> None:
    by_rank = four_ranks.run(_sums)
    for number in range(len(by_rank[0])):
        total = by_rank[0][number][0].clone()
        for of_rank in by_rank[1:]:
            total += of_rank[number][0]
        for of_rank in by_rank:
            assert torch.equal(of_rank[number][1], total), total.dtype
