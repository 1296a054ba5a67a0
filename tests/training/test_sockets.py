"""Every socket of a lane carries the lane's marks, at both ends, and so do its packets."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tlsched
from tests.training import loops, models
from tests.training.lab_ranks import LabRanks
from tests.training.ranks import RankPool
from tlsched.bands import lane_bands
from tlsched.lab import Lab
from tlsched.shim import sockets

RATE_BPS = 1_000_000_000
WIDTH = 384
LONG_STEPS = 60
BUCKET_BYTES = 4 * WIDTH * WIDTH


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, WIDTH), *hidden, nn.Linear(WIDTH, models.CLASSES)
    )


Marks = tuple[int, int, int, int]  # family, SO_PRIORITY, IP_TOS, IPV6_TCLASS (or 0)


def _marks(connection: sockets.Connection) -> Marks:
    with socket.socket(fileno=os.dup(connection.fd)) as sock:
        six = sock.family == socket.AF_INET6
        return (
            sock.family,
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
            0 if six else sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS),
            sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if six else 0,
        )


def _train(rank: int, _size: int, policy: str, steps: int, pause_s: float = 0.0) -> dict[str, Any]:
    """Marks by lane and peer, lanes in use, warnings, and a sum over the parameters."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with tlsched.schedule(net, optimizer, policy=policy) as run:
            marks = [
                {str(peer): _marks(c) for peer, c in lane.control.connections.items()}
                for lane in run._lanes
            ]
            for number, batch in enumerate(models.batches("mlp", rank, steps)):
                loops.backward(models.loss("mlp", net, batch))
                optimizer.step()
                optimizer.zero_grad()
                if pause_s:
                    time.sleep(pause_s)
                    print(f"step {number}", flush=True)  # noqa: T201  # the test listens
            lanes = sorted({bucket.lane for bucket in run.plan.buckets})
    return {
        "marks": marks,
        "lanes": lanes,
        "warnings": [str(w.message) for w in told if "tlsched" in str(w.message)],
        "sum": float(torch.stack([p.detach().double().sum() for p in net.parameters()]).sum()),
    }


def _check_marks(results: list[dict[str, Any]], *, family: int) -> None:
    for rank, result in enumerate(results):
        peers = {str(other) for other in range(len(results))} - {str(rank)}
        assert len(result["marks"]) == 6
        for band, of_lane in zip(lane_bands(), result["marks"], strict=True):
            assert set(of_lane) == peers
            for marks in of_lane.values():
                tos = (0, band.tos) if family == socket.AF_INET6 else (band.tos, 0)
                assert tuple(marks) == (family, band.priority, *tos)


@pytest.mark.parametrize("size", [2, 4])
def test_both_ends_of_every_lane_are_marked(
    size: int, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    pool = two_ranks if size == 2 else four_ranks
    results = pool.run(_train, "kernel", 3)
    _check_marks(results, family=socket.AF_INET)
    # Nothing of one host's own passes a link, so there is nothing to tell either.
    assert [result["warnings"] for result in results] == [[]] * size


def test_lanes_policy_leaves_sockets_alone(two_ranks: RankPool) -> None:
    for result in two_ranks.run(_train, "lanes", 3):
        assert all(m[1:] == (0, 0, 0) for lane in result["marks"] for m in lane.values())


def _two_makers(_rank: int, _size: int) -> list[tuple[int, int]]:
    """Sockets that other threads open meanwhile are nobody's lane."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()
        kept: list[socket.socket] = []

        def connect() -> None:
            while not stop.is_set() and len(kept) < 200:
                kept.append(socket.create_connection(server.getsockname()))
                kept.append(server.accept()[0])
                time.sleep(0.002)

        noise = threading.Thread(target=connect)
        noise.start()
        net = _net()
        with tlsched.schedule(net, torch.optim.SGD(net.parameters(), lr=0.1)) as run:
            peers = [len(lane.control.connections) for lane in run._lanes]
            stop.set()
            noise.join()
        assert peers == [1] * 6
        found = [
            (s.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
             s.getsockopt(socket.IPPROTO_IP, socket.IP_TOS))
            for s in kept
        ]  # fmt: skip
        for sock in kept:
            sock.send(b"alive")  # neither marked nor cut
            sock.close()
    return found


def test_other_sockets_of_the_process_are_left_alone(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_two_makers):
        assert set(found) == {(0, 0)}


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2, rate_bps=RATE_BPS) as built:
        yield built


def _tlsched(lab: Lab, host: int, *arguments: str) -> str:
    done = lab.run(
        host,
        [sys.executable, "-m", "tlsched", *arguments, "--iface", lab.hosts[host].iface],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def _attach(lab: Lab) -> None:
    for host in range(len(lab.hosts)):
        _tlsched(lab, host, "attach", "--rate", str(lab.rate_bps))


def _bytes_by_band(lab: Lab, host: int) -> dict[str, int]:
    read = json.loads(_tlsched(lab, host, "status", "--json"))
    status = read[0] if isinstance(read, list) else read
    return {band["name"]: band["bytes"] for band in status["bands"]}


@pytest.mark.root
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_packets_of_each_lane_are_counted_in_its_band(lab: Lab, family: str) -> None:
    """Hosts without any IPv4 address for ipv6; the classifier's counters read the wire."""
    six = family == "ipv6"
    if six:
        for host in range(2):
            iface = lab.hosts[host].iface
            lab.run(host, ["ip", "-4", "address", "flush", "dev", iface], check=True)
    _attach(lab)
    before = [_bytes_by_band(lab, host) for host in range(2)]
    steps = 12
    results = LabRanks(lab, _train, "kernel", steps, ipv6=six).results()
    _check_marks(results, family=socket.AF_INET6 if six else socket.AF_INET)
    assert [result["warnings"] for result in results] == [[], []]
    assert results[0]["sum"] == results[1]["sum"]
    used = results[0]["lanes"]
    assert 1 < len(used) < 6, "the test wants lanes in use and lanes that are not"
    for host in range(2):
        now = _bytes_by_band(lab, host)
        for lane in range(6):
            sent = now[f"lane{lane}"] - before[host][f"lane{lane}"]
            if lane in used:
                assert sent > (steps - 2) * BUCKET_BYTES / 2  # a ring of two sends it once
            elif lane != 0:  # lane 0 sends the parameters at the start
                assert sent < 20_000  # hands shaken, nothing else


@pytest.mark.root
def test_link_without_tlsched_is_told_once_and_by_name(lab: Lab) -> None:
    results = LabRanks(lab, _train, "kernel", 4).results()
    for result, host in zip(results, lab.hosts, strict=True):
        assert len(result["warnings"]) == 1
        assert f"does not order the lanes on {host.iface}:" in result["warnings"][0]


@pytest.mark.root
@pytest.mark.slow
def test_detach_attach_and_a_dead_link_change_nothing(lab: Lab) -> None:
    """Under training: tlsched detached and attached again, then the interface down for 5 s."""
    _attach(lab)
    undisturbed = LabRanks(lab, _train, "kernel", LONG_STEPS).results()
    ranks = LabRanks(lab, _train, "kernel", LONG_STEPS, 0.25)
    ranks.wait_for_line(0, "step 3")
    for verb in (["detach"], ["attach", "--rate", str(RATE_BPS)]):
        for host in range(2):
            _tlsched(lab, host, *verb)
    iface = lab.hosts[1].iface
    lab.run(1, ["ip", "link", "set", iface, "down"], check=True)
    time.sleep(5)
    lab.run(1, ["ip", "link", "set", iface, "up"], check=True)
    assert all(process.poll() is None for process in ranks.processes), "it ended too early"
    results = ranks.results()
    assert {result["sum"] for result in results} == {undisturbed[0]["sum"]}
    assert undisturbed[0]["sum"] == undisturbed[1]["sum"]
