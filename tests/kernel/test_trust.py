"""Trust on an attached link: set, changed in place, read back, undone, and refused."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ebpf import wire
from tests.kernel.hostcli import status, tlsched, tlsched_json
from tests.kernel.neighbourhood import introduce
from tests.netns import Namespace, Pair
from tlsched import cgroups, control, linktrust
from tlsched.bands import Band, all_bands, lane_bands
from tlsched.config import LinkSettings
from tlsched.control import Outcome
from tlsched.ebpf import libbpf, maps, program, trustmaps
from tlsched.errors import ApplyError, ConfigError
from tlsched.linktrust import TrustChange
from tlsched.tc.kernel import Kernel
from tlsched.tc.observed import Observed
from tlsched.trust import ANY_LOCAL, Trust, make_trust

pytestmark = pytest.mark.root


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of this test's own."""
    folder = cgroups.find_mount().point / f"tlt-{os.getpid()}"
    folder.mkdir()
    yield folder
    cgroups.remove(folder)


def attach(where: Namespace, trust: Trust, rate_bps: int = 10**9, dry_run: bool = False) -> Outcome:
    settings = LinkSettings("eth0", rate_bps, trust=trust)
    return where.call(control.attach, settings, dry_run=dry_run)


def program_id(where: Namespace) -> int:
    def read() -> Observed:
        with Kernel() as kernel:
            return kernel.read("eth0")

    ours = where.call(read).classifier
    assert ours is not None
    assert ours.program_id is not None
    return ours.program_id


@pytest.mark.stock_kernel
def test_trust_changes_in_place(netns_pair: Pair, group: Path) -> None:
    host = netns_pair.a
    one = make_trust(uids=[1000], sources=["10.0.0.0/8"])
    two = make_trust(["/" + group.name], [1000, 1001], ["10.0.0.0/8", "fd00::/8"])
    assert attach(host, one).changes[0] == "trust uids 1000, sources 10.0.0.0/8"
    loaded = program_id(host)
    assert attach(host, one).result == "unchanged"
    assert status(host)[0].trust == one

    line = f"change trust: cgroups none -> /{group.name}; uids 1000 -> 1000, 1001; "
    line += "sources 10.0.0.0/8 -> 10.0.0.0/8, fd00::/8"
    dry = attach(host, two, dry_run=True)
    assert (dry.result, dry.changes) == ("changed", (line,))
    assert status(host)[0].trust == one
    assert attach(host, two).changes == (line,)
    assert status(host)[0].trust == two
    assert attach(host, two).result == "unchanged"

    assert (
        attach(host, ANY_LOCAL).changes[0].startswith("change trust: local sockets listed -> any")
    )
    (link,) = status(host)
    assert (link.trust, link.state) == (ANY_LOCAL, "attached")
    assert program_id(host) == loaded


def test_a_failure_brings_the_old_trust_back(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, old = netns_pair.a, make_trust(uids=[1000])
    attach(host, old)

    def fail(*_: object) -> None:
        raise ApplyError("injected", hint="none")

    with monkeypatch.context() as patched:
        patched.setattr(Kernel, "apply", fail)
        with pytest.raises(ApplyError, match="injected"):
            attach(host, make_trust(uids=[1001]), rate_bps=2 * 10**9)
    assert status(host)[0].trust == old


class Fault:
    """Lets ``passed`` calls of a function of libbpf pass, fails once, and lets all others pass."""

    def __init__(self, real: Callable[..., None], passed: int) -> None:
        self.real, self.left, self.fired = real, passed, False

    def __call__(self, *given: object) -> None:
        if self.left == 0 and not self.fired:
            self.fired = True
            raise ApplyError("injected", hint="none")
        self.left -= 1
        self.real(*given)


@pytest.mark.parametrize("name", ["update", "delete"])
def test_a_write_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    old = trustmaps.resolve(make_trust(uids=[1, 2, 3], sources=["10.0.0.0/8"]))
    new = trustmaps.resolve(make_trust(uids=[3, 4, 5], sources=["fd00::/8"]))
    with program.load(all_bands(), old) as classifier:
        change = TrustChange(old, new, classifier.program_id)
        for passed in range(3):
            with monkeypatch.context() as patched:
                patched.setattr(libbpf, name, Fault(getattr(libbpf, name), passed))
                with pytest.raises(ApplyError, match="injected"), linktrust.applied(change):
                    pytest.fail("it was applied")
            assert trustmaps.read(classifier.program_id) == old
        with linktrust.applied(change):
            assert trustmaps.read(classifier.program_id) == new


def test_a_cgroup_that_is_gone_is_drift_and_attaching_again_mends_it(
    netns_pair: Pair, group: Path
) -> None:
    host, name = netns_pair.a, "/" + group.name
    trust = make_trust([name])
    attach(host, trust)
    number = cgroups.cgroup_id(group)
    group.rmdir()
    said = tlsched(host, "status", code=4).stdout
    assert f"trusted cgroup number {number} is gone, should be there" in said
    assert f"trusted: cgroups number {number} (gone)" in said
    with pytest.raises(ConfigError, match=name):
        attach(host, trust)
    group.mkdir()
    assert attach(host, trust).changes == (
        f"change trust: cgroups number {number} (gone) -> {name}",
    )
    (link,) = tlsched_json(host, "status")
    assert link["trust"] == {"cgroups": [name], "uids": [], "sources": [], "any_local": False}
    assert link["state"] == "attached"


def test_the_command_line_says_whom_to_trust(netns_pair: Pair, group: Path) -> None:
    host, rate = netns_pair.a, ("--iface", "eth0", "--rate", "1gbit")
    named = ("--trust-uid", "root", "--trust-uid", "1001", "--trust-source", "fd00::/8")
    outcome = tlsched_json(host, "attach", *rate, *named, "--trust-cgroup", str(group))
    assert outcome["changes"][0] == f"trust cgroups /{group.name}, uids 0, 1001, sources fd00::/8"
    said = tlsched(host, "status").stdout
    assert f"trusted: cgroups /{group.name}, uids 0, 1001, sources fd00::/8" in said
    refused = tlsched(host, "attach", *rate, "--trust-source", "10.0.0.1/8", code=2).stderr
    assert "10.0.0.0/8" in refused
    changed = tlsched_json(host, "attach", *rate)
    assert changed["result"] == "changed"
    assert len(changed["changes"]) == 1
    assert "trusted: every local socket" in tlsched(host, "status").stdout


def test_a_cgroup_that_is_not_there_or_too_deep_is_refused(netns_pair: Pair, group: Path) -> None:
    deep = group.joinpath(*"abcdefghijklmnop")
    deep.mkdir(parents=True)
    for path, said in (
        ("/tlt-no-such-group", "no cgroup"),
        ("/" + str(deep.relative_to(cgroups.find_mount().point)), "levels deep"),
    ):
        with pytest.raises(ConfigError, match=said):
            attach(netns_pair.a, make_trust([path]))
    assert status(netns_pair.a) == []


class Flood:
    """Datagrams of one lane, counted, until told to stop or half a minute has passed."""

    def __init__(self, lane: Band, cgroup: Path, uid: int) -> None:
        self.lane, self.cgroup, self.uid = lane, cgroup, uid
        self.sent = multiprocessing.RawValue(ctypes.c_uint64, 0)
        self.stop = multiprocessing.RawValue(ctypes.c_bool, False)

    def send(self, address: str) -> None:
        (self.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        os.setuid(self.uid)
        deadline_s = time.monotonic() + 30
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            wire.mark(sock, self.lane)
            while not self.stop.value and time.monotonic() < deadline_s:
                sock.sendto(b"marked", (address, 7150))
                self.sent.value += 1


def test_changes_while_packets_pass_open_no_gap(netns_pair: Pair, group: Path) -> None:
    """Who is trusted before and after always is; who is neither before nor after never is."""
    host, address = netns_pair.a, netns_pair.b.v4
    introduce(netns_pair)
    attach(host, ANY_LOCAL)
    number, cgroup = program_id(host), "/" + group.name
    trusts = [
        trustmaps.resolve(trust)
        for trust in (
            make_trust([cgroup]),
            make_trust(["/" + group.name, "/"], [7]),
            make_trust(uids=[0]),
            make_trust(uids=[0, 9], sources=["10.0.0.0/8"]),
            ANY_LOCAL,
            make_trust([cgroup], [0, 1000]),
        )
    ]
    # Root's socket in the group is in all of them, another user's elsewhere in two.
    keen = Flood(lane_bands()[0], group, uid=0)
    sly = Flood(lane_bands()[5], group.parent, uid=5)
    senders = [host.spawn(each.send, address) for each in (keen, sly)]
    try:
        while not (keen.sent.value and sly.sent.value):
            assert all(sender.is_alive() for sender in senders)
        trustmaps.change(number, trusts[0])
        time.sleep(0.05)  # packets on their way may still go by the old
        before = maps.read_counters(number)
        for held in [each for at, each in enumerate(trusts) if at not in (1, 4)] * 50:
            trustmaps.change(number, held)
        between = maps.read_counters(number)
        for held in trusts * 20:
            trustmaps.change(number, held)
    finally:
        for flood, sender in zip((keen, sly), senders, strict=True):
            flood.stop.value = True
            sender.join(10)
    counters = maps.read_counters(number)
    assert before["lane5"] == between["lane5"]
    assert before["lane0"].packets < between["lane0"].packets
    assert between["lane5"].packets < counters["lane5"].packets
    assert counters["lane0"].packets == keen.sent.value
