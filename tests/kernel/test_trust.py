"""Trust on an attached link: set, changed in place, read back, undone, and refused."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import cgrouptree
from tests.kernel.hostcli import status, tlsched, tlsched_json
from tests.netns import Namespace, Pair
from tlsched import cgroups, control, linktrust
from tlsched.bands import all_bands
from tlsched.config import LinkSettings
from tlsched.control import Outcome
from tlsched.ebpf import libbpf, program, trustmaps
from tlsched.errors import ApplyError, ConfigError
from tlsched.linktrust import TrustChange
from tlsched.tc.kernel import Kernel
from tlsched.tc.observed import Observed
from tlsched.trust import ANY_LOCAL, MAX_ENTRIES, Trust, make_trust

pytestmark = pytest.mark.root


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of this test's own."""
    with cgrouptree.cgroup() as path:
        yield path


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


@pytest.mark.parametrize("passed", [600, 1500])
def test_full_sets_whose_change_was_killed_are_changed_all_the_same(
    netns_pair: Pair, passed: int
) -> None:
    """Entries of two trusts fill a set; those of a third must not fail for want of room."""
    host = netns_pair.a
    one, two, three = (
        make_trust(sources=[f"{first}.{n >> 8}.{n & 255}.0/24" for n in range(MAX_ENTRIES)])
        for first in (10, 11, 12)
    )
    attach(host, one)
    loaded = program_id(host)
    child = host.spawn(_killed_after_writes, passed, two)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert status(host)[0].trust not in (one, two)
    assert attach(host, three).result == "changed"
    (link,) = status(host)
    assert (link.trust, link.state) == (three, "attached")
    assert attach(host, three).result == "unchanged"
    assert program_id(host) != loaded, "the full maps went with their program"


def _killed_after_writes(passed: int, trust: Trust) -> None:
    """Attach, in a child that is killed after so many writes to the loaded classifier's maps."""
    change = trustmaps.change

    def counted_change(*given: Any) -> None:
        done = itertools.count(1)
        for name in ("update", "delete"):
            setattr(libbpf, name, _counted(getattr(libbpf, name), done, passed))
        change(*given)

    setattr(trustmaps, "change", counted_change)  # noqa: B010  # mypy takes no other
    control.attach(LinkSettings("eth0", 10**9, trust=trust))


def _counted(real: Callable[..., None], done: Iterator[int], passed: int) -> Callable[..., None]:
    def write(*given: object) -> None:
        real(*given)
        if next(done) == passed:
            os.kill(os.getpid(), signal.SIGKILL)

    return write


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
