"""A context leaves nothing behind: no file descriptor, thread, hook, patch, memory or reference."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tlsched
from tests.training import loops, models
from tests.training.ranks import RankPool
from tlsched.errors import CommunicationError

CONTEXTS = 50
WARM_UP = 8
TIMEOUT_S = 10.0
LAST_LANE_S = 2 * TIMEOUT_S
GROWTH_MIB = 40  # 42 contexts; if each kept its gradients, it would be 100, and the model 300


class _LeaveError(Exception):
    """The loop's own exception."""


def _net(width: int = 384) -> nn.Sequential:
    """Several buckets, each on a lane of its own."""
    torch.manual_seed(3)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), *hidden, nn.Linear(width, models.CLASSES)
    )


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loops.backward(models.loss("mlp", net, batch))
    optimizer.step()
    optimizer.zero_grad()


def _context(rank: int, ending: str) -> None:
    """One context that ends as ``ending`` says."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batches = models.batches("mlp", rank, 4)
    with suppress(_LeaveError), tlsched.schedule(net, optimizer, timeout_s=TIMEOUT_S):
        for number, batch in enumerate(batches):
            if ending == "in flight" and number == 3:
                loops.backward(models.loss("mlp", net, batch))
                raise _LeaveError
            _step(net, optimizer, batch)
        if ending == "exception":
            raise _LeaveError


def _state() -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # threads that come and go leave half-used arenas
    status = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_mib": int(status.split()[0]) // 1024,
    }


def _many_contexts(rank: int, _size: int, ending: str) -> tuple[dict[str, int], dict[str, int]]:
    warnings.simplefilter("ignore")  # an update that is missing after "in flight"
    for _ in range(WARM_UP):
        _context(rank, ending)
    dist.barrier()
    before = _state()
    for _ in range(CONTEXTS - WARM_UP):
        _context(rank, ending)
    dist.barrier()
    # A lane whose last send gloo forgot is closed when gloo's own timeout ends it.
    end_s = time.monotonic() + LAST_LANE_S
    while (after := _state())["fds"] > before["fds"] and time.monotonic() < end_s:
        time.sleep(0.5)
    return before, after


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["normal", "exception", "in flight"])
def test_fifty_contexts_leave_no_growth(two_ranks: RankPool, ending: str) -> None:
    for before, after in two_ranks.run(_many_contexts, ending):
        assert after["fds"] <= before["fds"]
        assert after["threads"] <= before["threads"]
        assert after["rss_mib"] - before["rss_mib"] < GROWTH_MIB


def _hooks(net: nn.Module) -> list[Any]:
    of_modules = [
        getattr(module, name)
        for module in net.modules()
        for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    ]
    of_parameters = [p._post_accumulate_grad_hooks for p in net.parameters()]
    return [hooks for hooks in (*of_modules, *of_parameters) if hooks]


def _methods() -> dict[str, Any]:
    classes = (nn.Module, nn.Parameter, torch.optim.Optimizer, torch.Tensor)
    return {f"{c.__name__}.{n}": v for c in classes for n, v in vars(c).items() if callable(v)}


def _restored(rank: int, _size: int, ending: str) -> list[str]:
    warnings.simplefilter("ignore")
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    before = _methods()
    with suppress(_LeaveError), tlsched.schedule(net, optimizer):
        for number, batch in enumerate(models.batches("mlp", rank, 5)):
            if ending == "learning" and number == 1:
                break
            if ending == "exception" and number == 4:
                loops.backward(models.loss("mlp", net, batch))
                raise _LeaveError
            _step(net, optimizer, batch)
        loops.backward(models.loss("mlp", net, batch))
    wrong = [name for name, value in _methods().items() if before.get(name) is not value]
    wrong += [f"hooks {hooks}" for hooks in _hooks(net)]
    wrong += [name for name in ("step", "zero_grad", "state_dict") if name in optimizer.__dict__]
    for parameter in net.parameters():
        if type(parameter) is not nn.Parameter or type(parameter.grad) is not torch.Tensor:
            wrong.append(f"{type(parameter)} with {type(parameter.grad)}")
    if torch.overrides._get_current_function_mode() is not None:  # type: ignore[no-untyped-call]  # torch leaves it untyped
        wrong.append("a torch function mode")
    _step(net, optimizer, batch)  # and it trains on, alone
    return wrong


@pytest.mark.parametrize("ending", ["normal", "learning", "exception"])
def test_everything_is_as_it_was(two_ranks: RankPool, ending: str) -> None:
    assert two_ranks.run(_restored, ending) == [[], []]


def _freed(rank: int, _size: int, ending: str) -> list[str]:
    """What is still alive, although the exception (with its frames) is kept."""
    warnings.simplefilter("ignore")
    kept: list[BaseException] = []
    threads = len(os.listdir("/proc/self/task"))
    fds = len(os.listdir("/proc/self/fd"))

    def train() -> dict[str, Any]:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        watched = {"model": weakref.ref(net), "weight": weakref.ref(net[1].weight)}
        try:
            with tlsched.schedule(net, optimizer) as run:
                for number, batch in enumerate(models.batches("mlp", rank, 6)):
                    _step(net, optimizer, batch)
                    if number == 4 and ending != "normal" and rank == 1:
                        raise _LeaveError
                watched["lane"] = weakref.ref(run._agreement)
        except (_LeaveError, CommunicationError) as error:
            kept.append(error)
            cause: BaseException | None = error
            while cause is not None:  # the loop's frames are the caller's to keep or not
                cause = cause.with_traceback(None).__cause__
        return watched

    watched = train()
    gc.collect()
    alive = [name for name, reference in watched.items() if reference() is not None]
    if len(os.listdir("/proc/self/task")) > threads + 1:  # a helper of torch's own
        alive.append("threads")
    if len(os.listdir("/proc/self/fd")) > fds:
        alive.append("file descriptors")
    return alive


@pytest.mark.parametrize("ending", ["normal", "exception"])
def test_nothing_keeps_the_model_alive(two_ranks: RankPool, ending: str) -> None:
    assert two_ranks.run(_freed, ending) == [[], []]


def _few_fds(rank: int, _size: int) -> tuple[str, int]:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
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
        assert more == 0


def _trained(rank: int, group: Any = None, policy: str = "kernel") -> models.Tensors:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tlsched.schedule(net, optimizer, process_group=group, policy=policy):
        for batch in models.batches("mlp", rank, 5):
            _step(net, optimizer, batch)
    return models.parameters(net)


def _in_pairs(rank: int, _size: int) -> tuple[models.Tensors, str]:
    """Two groups of two train different things at the same time; then rank 3 fails."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    parameters = _trained(rank, mine)
    message = ""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    try:
        with tlsched.schedule(net, optimizer, process_group=mine, timeout_s=60):
            for number, batch in enumerate(models.batches("mlp", rank, 5)):
                if number == 3 and rank == 3:
                    raise _LeaveError
                _step(net, optimizer, batch)
    except (CommunicationError, _LeaveError) as error:
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
    assert results[3][1].startswith("_LeaveError")
    assert "rank 3 left: _LeaveError" in results[1][1]


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
                _step(net, optimizer, batch)
        apart.append(models.parameters(net))
    first, second = (make(seed) for seed in seeds)
    with tlsched.schedule(*first), tlsched.schedule(*second):
        for batch in batches:
            _step(*first, batch)
            _step(*second, batch)
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
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    seen: set[str] = set()
    with tlsched.schedule(net, optimizer):
        for batch in models.batches("mlp", rank, 5):
            _step(net, optimizer, batch)
            seen |= {thread.name for thread in set(threading.enumerate()) - before}
    return sorted(seen)
