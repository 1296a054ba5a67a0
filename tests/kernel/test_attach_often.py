"""Attached and detached hundreds of times under load: nothing is left, and traffic goes on."""

from __future__ import annotations

import gc
import os
import time

import pytest

from tests import netns
from tests.kernel.hostcli import attach, detach, snapshot
from tests.netns import Namespace, Pair
from tests.tc.stops import Stops
from tests.tc.traffic import flow
from tlsched.bands import all_bands
from tlsched.ebpf import libbpf
from tlsched.tc.kernel import Kernel

pytestmark = pytest.mark.root
TIMES = 200
# What a machine that does much else beside may add to a stop: the tests share two processors.
MOST_S = 0.5


def open_files() -> int:
    gc.collect()  # pyroute2's sockets and their event loops hold each other
    return len(os.listdir("/proc/self/fd"))


def attached_program(host: Namespace, dev: str) -> tuple[int, tuple[int, ...]]:
    """The ids of the program on the link and of its maps."""

    def inside() -> tuple[int, tuple[int, ...]]:
        with Kernel() as kernel:
            ours = kernel.read(dev).classifier
        assert ours is not None
        assert ours.program_id is not None
        with libbpf.program_by_id(ours.program_id) as fd:
            _, maps = libbpf.program_info(fd)
        return ours.program_id, tuple(maps)

    return host.call(inside)


def exists(what: str, number: int) -> bool:
    done = netns.run("bpftool", what, "show", "id", str(number), check=False)
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_two_hundred_times_under_load(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    with (
        flow(netns_pair, None),
        flow(netns_pair, all_bands()[2]),
        Stops(netns_pair, all_bands()[0]) as stops,
    ):
        files = 0
        for _ in range(TIMES):
            attach(host, dev)
            detach(host, dev)
            files = files or open_files()  # after the first round: what is kept once is no leak
        assert open_files() <= files
        assert snapshot(host, dev) == before
    assert stops.sent > TIMES
    assert stops.longest_s < MOST_S


def test_no_program_or_map_is_left(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    files = 0
    for _ in range(3):
        attach(host, dev)
        program, maps = attached_program(host, dev)
        assert maps
        detach(host, dev)
        deadline_s = time.monotonic() + 5  # the kernel frees them after a grace period (RCU)
        while exists("prog", program) or any(exists("map", number) for number in maps):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        files = files or open_files()
    assert open_files() <= files
