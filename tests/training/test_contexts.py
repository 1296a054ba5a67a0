"""Contexts side by side, in groups of ranks, alone and under torchrun."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tlsched
from tests.training import models
from tests.training.faulty import (
    LeaveError,
    deep_net,
    step,
)
from tests.training.ranks import RankPool
from tlsched.errors import CommunicationError


def _few_fds(rank: int, _size: int) -> tuple[str, int]:
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    gc.collect()  # what tests before this one have left in cycles holds descriptors
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    message = ""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 20, hard))
    try:
        with tlsched.schedule(net, optimizer):
            pass
    except CommunicationError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return message, len(os.listdir("/proc/self/fd")) - open_now


def test_too_few_file_descriptors_are_told_on_every_rank(two_ranks: RankPool) -> None:
    for message, more in two_ranks.run(_few_fds):
        assert "rank 1 has room for" in message
        assert "6 lanes over 2 ranks need 46" in message
        assert more <= 0  # fewer: something older was let go meanwhile


def _trained(rank: int, group: Any = None, policy: str = "kernel") -> models.Tensors:
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tlsched.schedule(net, optimizer, process_group=group, policy=policy):
        for batch in models.batches("mlp", rank, 5):
            step(net, optimizer, batch)
    return models.parameters(net)


def _in_pairs(rank: int, _size: int) -> tuple[models.Tensors, str]:
    """Two groups of two train different things at the same time; then rank 3 fails."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    parameters = _trained(rank, mine)
    message = ""
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    try:
        with tlsched.schedule(net, optimizer, process_group=mine, timeout_s=60):
            for number, batch in enumerate(models.batches("mlp", rank, 5)):
                if number == 3 and rank == 3:
                    raise LeaveError
                step(net, optimizer, batch)
    except (CommunicationError, LeaveError) as error:
        message = f"{type(error).__name__}: {error}"
    return parameters, message


def test_groups_of_ranks_train_apart_and_errors_name_the_rank_of_the_job(
    four_ranks: RankPool,
) -> None:
    results = four_ranks.run(_in_pairs)
    parameters = [p for p, _ in results]
    assert models.identical(parameters[0], parameters[2])
    assert models.identical(parameters[1], parameters[3])
    assert not models.identical(parameters[0], parameters[1])
    assert [results[0][1], results[2][1]] == ["", ""]
    assert results[3][1].startswith("LeaveError")
    assert "rank 3 left: LeaveError" in results[1][1]


def _two_models(rank: int, _size: int) -> tuple[list[models.Tensors], list[models.Tensors]]:
    """The parameters of two models trained in turns in two open contexts, and one by one."""
    apart, together = [], []
    seeds = (3, 4)
    batches = models.batches("mlp", rank, 6)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = models.mlp()
        return net, torch.optim.SGD(net.parameters(), lr=0.05)

    for seed in seeds:
        net, optimizer = make(seed)
        with tlsched.schedule(net, optimizer):
            for batch in batches:
                step(net, optimizer, batch)
        apart.append(models.parameters(net))
    first, second = (make(seed) for seed in seeds)
    with tlsched.schedule(*first), tlsched.schedule(*second):
        for batch in batches:
            step(*first, batch)
            step(*second, batch)
    together = [models.parameters(first[0]), models.parameters(second[0])]
    assert torch.overrides._get_current_function_mode() is None  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return apart, together


def test_two_contexts_at_once(two_ranks: RankPool) -> None:
    for apart, together in two_ranks.run(_two_models):
        for one, other in zip(apart, together, strict=True):
            assert models.identical(one, other)


SCRIPT = """
import threading
import torch
import torch.distributed as dist
import tlsched

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(32, 600), torch.nn.ReLU(), torch.nn.Linear(600, 600))
optimizer = torch.optim.AdamW(net.parameters())
torch.manual_seed(dist.get_rank())
with tlsched.schedule(net, optimizer) as run:
    for _ in range(6):
        net(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
total = torch.stack([p.detach().double().sum() for p in net.parameters()]).sum()
both = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(both, total)
assert len({float(value) for value in both}) == 1, both
print("trained", flush=True)
dist.destroy_process_group()
"""


def _run_script(tmp_path: Path, *launcher: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error::UserWarning",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=environment, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_torchrun(tmp_path: Path) -> None:
    """Two ranks of one host over loopback: trained alike, exit 0, and not one warning."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert _run_script(tmp_path, *launcher).count("trained") == 2


def test_one_rank_alone(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    assert _run_script(tmp_path, *launcher).count("trained") == 1


def test_no_thread_of_ours_while_training(two_ranks: RankPool) -> None:
    assert two_ranks.run(_python_threads) == [[], []]


def _python_threads(rank: int, _size: int) -> list[str]:
    before = set(threading.enumerate())
    net = deep_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    seen: set[str] = set()
    with tlsched.schedule(net, optimizer):
        for batch in models.batches("mlp", rank, 5):
            step(net, optimizer, batch)
            seen |= {thread.name for thread in set(threading.enumerate()) - before}
    return sorted(seen)
