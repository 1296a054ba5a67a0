"""A server on each worker's host, the hosts being network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests import netns
from tests.cgrouptree import eventually
from tests.training.served_host import gone

pytestmark = pytest.mark.root

PORT = "29511"


@pytest.fixture
def hosts() -> Iterator[netns.Pair]:
    pair = netns.make_pair()
    try:
        yield pair
    finally:
        for end in (pair.a, pair.b):
            netns.remove(end.name)


def _start(pair: netns.Pair, rank: int, how: str) -> subprocess.Popen[str]:
    host = (pair.a, pair.b)[rank]
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": pair.a.v4, "MASTER_PORT": PORT}
    return host.popen(
        sys.executable,
        "-m",
        "tests.training.served_host",
        how,
        env=os.environ | ranks | {"GLOO_SOCKET_IFNAME": host.dev},
        stdout=subprocess.PIPE,
    )


def _train(pair: netns.Pair, how_of_second: str = "") -> list[dict[str, Any]]:
    processes = [_start(pair, 0, ""), _start(pair, 1, how_of_second)]
    return [json.loads(p.communicate(timeout=60)[0].splitlines()[-1]) for p in processes]


def test_each_host_has_a_server_that_ends_with_the_job(hosts: netns.Pair) -> None:
    told = _train(hosts)
    for one in told:
        assert one["error"] == ""
        assert one["servers"] == [hosts.a.v4, hosts.b.v4]
        eventually(partial(gone, one["child"]), "the server has ended")
    assert told[0]["sum"] == told[1]["sum"]


def test_a_host_whose_worker_is_killed_loses_its_server_and_is_named(hosts: netns.Pair) -> None:
    told = _train(hosts, "dies")
    assert "rank 1 left" in told[0]["error"]
    for one in told:
        eventually(partial(gone, one["child"]), "the server has ended")
