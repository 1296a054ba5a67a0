"""NCCL lanes, as far as a machine without a GPU can show them: the options that are passed, the
order in which collectives are started, and what is refused. See nccl_by_gloo.py for the stand-in:
it is no NCCL, and nothing here shows that NCCL orders a packet.
"""

from __future__ import annotations

import datetime
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import tlsched
from tests.shim.nccl_by_gloo import NcclByGloo, OldNcclByGloo
from tests.training.ranks import RankPool, fresh_ranks
from tlsched.bands import DEFAULT_DSCPS, LANE_COUNT, lane_bands
from tlsched.errors import CommunicationError, ConfigError, ModelRefused
from tlsched.shim.backends import choose_backend, refuse_for_nccl
from tlsched.shim.nccl import Nccl, OnStream
from tlsched.shim.preflight import Wire, preflight, wire
from tlsched.shim.reduction import Reduction
from tlsched.shim.roster import Roster
from tlsched.shim.transport import GLOO

BANDS = lane_bands()
CPU = torch.device("cpu")
WIDTH = 384  # a layer of its own bucket: more than planning's FUSE_BYTES
BRANCHES = 7
STEPS = 5
QUIET = {
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}


def _nccl(over: Wire, group_class: Any = NcclByGloo, **options: Any) -> Nccl:
    options = {"bands": BANDS, "environ": QUIET, "lane_count": LANE_COUNT, **options}
    return Nccl(CPU, over=over, group_class=group_class, **options)


def _made(transport: Nccl, lane: int) -> Any:
    return transport.make(HashStore(), 0, 1, 7.0, lane)


# The options


@pytest.mark.parametrize("lane", range(LANE_COUNT))
def test_a_lane_over_roce_asks_for_its_dscp(lane: int) -> None:
    transport = _nccl(Wire.ROCE)
    options = _made(transport, lane).options
    assert options.config.traffic_class == DEFAULT_DSCPS[lane] << 2
    assert options._timeout == datetime.timedelta(seconds=7)
    assert options.group_name == f"tlsched lane {lane}"


@pytest.mark.parametrize("over", [Wire.TCP, Wire.INFINIBAND])
def test_no_traffic_class_where_it_means_something_else_or_nothing(over: Wire) -> None:
    assert _made(_nccl(over), 0).options.config.traffic_class is None


def test_no_traffic_class_on_lanes_without_marks() -> None:
    assert _made(_nccl(Wire.ROCE, bands=()), 0).options.config.traffic_class is None


def test_a_torch_without_traffic_classes_leaves_lanes_unmarked_and_says_so() -> None:
    transport = _nccl(Wire.ROCE, OldNcclByGloo)
    assert not hasattr(_made(transport, 0).options.config, "traffic_class")
    agreement: Any = None  # not asked
    why = transport.why_unmarked(agreement, [])
    assert why == "this build of torch cannot set config.traffic_class (it needs NCCL 2.26)"
    assert _nccl(Wire.ROCE).why_unmarked(agreement, []) is None
    assert "service level" in str(_nccl(Wire.INFINIBAND).why_unmarked(agreement, []))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_torch_has_what_is_asked_of_it() -> None:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=7)
    options.group_name = "tlsched lane 0"
    if hasattr(options.config, "traffic_class"):
        options.config.traffic_class = BANDS[0].tos
    for name in ("allreduce", "broadcast", "shutdown", "abort", "_group_start", "_group_end"):
        assert hasattr(dist.ProcessGroupNCCL, name), name


# Its manners


class _Failing:
    def wait(self) -> bool:
        raise RuntimeError("NCCL communicator was aborted")


class _Queued:
    def __init__(self) -> None:
        self.limits: list[Any] = []

    def wait(self, *limit: Any) -> bool:
        self.limits.append(limit)
        return True


def _reduction(work: Any) -> Reduction:
    roster = Roster(HashStore(), 0, [0])
    return Reduction(OnStream(work), roster, lambda: None)  # type: ignore[arg-type]  # looks like a Work


def test_no_limit_reaches_nccl_whose_watchdog_has_its_own() -> None:
    work = _Queued()
    _reduction(work).wait(60.0)
    assert work.limits == [()]


def test_a_failure_is_told_at_once() -> None:
    with pytest.raises(RuntimeError, match="aborted"):
        _reduction(_Failing()).wait(60.0)


def test_communicators_are_aborted_together_and_once() -> None:
    transport = _nccl(Wire.ROCE)
    groups = [_made(transport, lane) for lane in range(2)]
    NcclByGloo.log.clear()
    for group in groups:
        transport.abort(group)
        transport.leave(group)
    told = [what for what, _ in NcclByGloo.log]
    assert told == ["group start", "abort", "abort", "group end"]


# What is refused


def test_by_default_the_parameters_tell_the_backend() -> None:
    assert choose_backend(nn.Linear(2, 2), None, 1, ()) is GLOO
    assert choose_backend(nn.Linear(2, 2), "gloo", 1, ()) is GLOO


def test_an_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="no backend 'mpi' for lanes; use one of gloo, nccl"):
        choose_backend(nn.Linear(2, 2), "mpi", 1, ())


def test_a_parameter_or_buffer_that_is_not_on_a_gpu_is_named() -> None:
    with pytest.raises(ModelRefused, match=r"^0\.weight is on cpu, and NCCL carries.*gloo"):
        refuse_for_nccl(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def _refused(_rank: int, _size: int) -> tuple[str, list[str]]:
    """The error, and what the ranks' store holds of ours: nothing, because nothing was begun."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = optimizer.step
    try:
        tlsched.schedule(net, optimizer, backend="nccl")
    except ConfigError as error:
        assert optimizer.step == step
        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
        return str(error), ["begun"] if store.check([f"tlsched/contexts/{_rank}"]) else []
    return "nothing was raised", []


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch is built with NCCL")
def test_without_nccl_it_is_refused_in_a_line_before_anything_changes(pool: RankPool) -> None:
    for text, begun in pool.run(_refused):
        assert text.startswith('backend="nccl" needs a torch that is built with NCCL')
        assert "\n" not in text
        assert not begun


# Real ranks, by the stand-in


class _AnyOrder(Nccl):
    one_order = False


class _Branches(nn.Module):
    """Layers whose gradients come in the order of ``order``."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for number in self.order:
            total = total + self.layers[number](x)
        return total


def _train(rank: int, _size: int, how: str) -> dict[str, Any]:
    """Train by gloo's lanes or by the stand-in; ranks make gradients in different orders."""
    torch.manual_seed(1)
    net = _Branches(list(range(BRANCHES)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    policy = "kernel" if how == "one order" else "lanes"
    NcclByGloo.log.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = tlsched.schedule(net, optimizer, policy=policy, backend="gloo")
        if how != "gloo":
            kind = Nccl if how == "one order" else _AnyOrder
            run._transport = kind(
                CPU, BANDS, QUIET, lane_count=LANE_COUNT, over=Wire.TCP, group_class=NcclByGloo
            )
        with run:
            marks = [[_marks(c) for c in lane.control.marked] for lane in run._lanes]
            for step in range(STEPS):
                if rank and not run.learning:
                    net.order = net.order[::-1]
                torch.manual_seed(10 * step + rank)
                if step == STEPS - 1:
                    NcclByGloo.log.clear()
                net(torch.randn(4, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            plan, started = run.plan, list(NcclByGloo.log)
            run.flush()
        closed = NcclByGloo.log[len(started) :]
    return {
        "values": [p.detach().clone() for p in net.parameters()],
        "started": [name for what, name in started if what == "allreduce"],
        "planned": [f"tlsched lane {plan.buckets[b].lane}" for b in plan.launch_order],
        "closed": sorted(closed),
        "marks": marks,
        "told": [str(w.message) for w in told],
    }


def _marks(connection: Any) -> tuple[int, int]:
    with socket.socket(fileno=os.dup(connection.fd)) as sock:
        return (
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
            sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS),
        )


def _fail(rank: int, _size: int) -> tuple[str, list[tuple[str, str]]]:
    """Rank 1's loop raises; the other rank hears of it."""
    net = _Branches(list(range(BRANCHES)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run = tlsched.schedule(net, optimizer, policy="lanes", backend="gloo", timeout_s=10.0)
    run._transport = Nccl(
        CPU, (), QUIET, lane_count=LANE_COUNT, over=Wire.TCP, group_class=NcclByGloo
    )
    try:
        with run:
            if rank:
                NcclByGloo.log.clear()
                raise KeyError("the loop's own")
            for _ in range(STEPS):
                net(torch.randn(4, WIDTH)).mean().backward()
                NcclByGloo.log.clear()
                optimizer.step()
    except (KeyError, CommunicationError) as error:
        return str(error), list(NcclByGloo.log)
    return "nothing was raised", []


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with fresh_ranks(2) as ranks:
        yield ranks


def test_all_ranks_start_all_lanes_in_the_plans_order(pool: RankPool) -> None:
    first, second = pool.run(_train, "one order")
    assert first["started"] == second["started"] == first["planned"]
    assert len(set(first["started"])) > 1, "one lane shows no order across lanes"
    loose_first, loose_second = pool.run(_train, "any order")
    assert loose_first["started"] != loose_second["started"], "these ranks never differ"


def test_it_trains_to_the_same_bits_as_gloos_lanes(pool: RankPool) -> None:
    for nccl, gloo in zip(pool.run(_train, "one order"), pool.run(_train, "gloo"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(nccl["values"], gloo["values"], strict=True))


def test_over_tcp_the_sockets_are_marked_and_every_group_is_left(pool: RankPool) -> None:
    for result in pool.run(_train, "one order"):
        assert result["marks"] == [[(band.priority, band.tos)] for band in BANDS]
        assert result["closed"] == [("shutdown", f"tlsched lane {n}") for n in range(LANE_COUNT)]
        assert not [text for text in result["told"] if "NCCL" in text]


def test_an_exception_aborts_every_group(pool: RankPool) -> None:
    for text, log in pool.run(_fail):
        assert "the loop's own" in text, text
        aborted = {name for what, name in log if what == "abort"}
        assert aborted == {f"tlsched lane {n}" for n in range(LANE_COUNT)}
        assert "shutdown" not in {what for what, _ in log}


# The environment


@pytest.mark.parametrize(
    ("environ", "over", "named"),
    [
        ({}, Wire.ROCE, ["NCCL_LAUNCH_ORDER_IMPLICIT"]),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, Wire.ROCE, []),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, Wire.ROCE, ["NCCL_LAUNCH_ORDER_IMPLICIT"]),
        ({**QUIET, "NCCL_IB_TC": "106"}, Wire.ROCE, ["NCCL_IB_TC"]),
        ({**QUIET, "NCCL_IB_TC": "0", "NCCL_IB_SL": "3"}, Wire.ROCE, ["NCCL_IB_TC", "NCCL_IB_SL"]),
        ({**QUIET, "NCCL_IB_TC": "-1", "NCCL_IB_SL": "-1"}, Wire.ROCE, []),
        ({**QUIET, "NCCL_IB_TC": "106"}, Wire.TCP, []),
        (QUIET, Wire.TCP, []),
        (
            {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"},
            Wire.TCP,
            ["NCCL_RUNTIME_CONNECT", "NCCL_SOCKET_IFNAME"],
        ),
        ({**QUIET, "NCCL_RUNTIME_CONNECT": "1"}, Wire.TCP, ["NCCL_RUNTIME_CONNECT"]),
        ({**QUIET, "NCCL_NET": "AWS Libfabric"}, Wire.PLUGIN, ["NCCL_NET"]),
    ],
)
def test_preflight(environ: Mapping[str, str], over: Wire, named: list[str]) -> None:
    findings = preflight(environ, over, LANE_COUNT)
    assert [finding.variable for finding in findings] == named
    for finding in findings:
        assert finding.remedy
        assert "\n" not in str(finding)


def test_one_lane_needs_no_launch_order() -> None:
    assert preflight({}, Wire.ROCE, 1) == []


def test_findings_are_said_by_the_transport() -> None:
    transport = _nccl(Wire.ROCE, environ={})
    assert list(transport.findings()) == [
        "NCCL_LAUNCH_ORDER_IMPLICIT: is not set, and several communicators on one GPU may block "
        "each other; set it to 1 (NCCL 2.26 and newer)"
    ]


@pytest.mark.parametrize(
    ("environ", "ports", "over"),
    [
        ({}, [], Wire.TCP),
        ({}, ["Ethernet"], Wire.ROCE),
        ({}, ["Ethernet", "InfiniBand"], Wire.INFINIBAND),
        ({"NCCL_IB_DISABLE": "1"}, ["Ethernet"], Wire.TCP),
        ({"NCCL_IB_DISABLE": "0"}, ["Ethernet"], Wire.ROCE),
        ({"NCCL_NET": "Socket"}, ["InfiniBand"], Wire.TCP),
        ({"NCCL_NET": "ib"}, ["Ethernet"], Wire.ROCE),
        ({"NCCL_NET": "AWS Libfabric"}, [], Wire.PLUGIN),
    ],
)
def test_what_the_packets_travel_by(
    environ: Mapping[str, str], ports: list[str], over: Wire, tmp_path: Path
) -> None:
    for number, layer in enumerate(ports):
        port = tmp_path / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
    assert wire(environ, tmp_path) is over
