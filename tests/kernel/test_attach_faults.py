"""A change that fails half-way leaves the link as it was, whichever change it is."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
from pyroute2.ethtool.ioctl import IoctlEthtool
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tests.kernel.hostcli import attach, detach, snapshot, state
from tests.netns import Pair
from tlsched.errors import ApplyError, FeatureMissing, HostError, InterfaceMissing
from tlsched.tc import device
from tlsched.tc.changes import Change, DelClsact
from tlsched.tc.kernel import Kernel
from tlsched.tc.observed import Observed
from tlsched.tc.probe import probe

pytestmark = pytest.mark.root
APPLY = Kernel.apply


class InjectedError(ApplyError):
    """Ours, to be told from a real one."""


class Fault:
    """Lets ``after`` changes pass, then fails once: before or after the next one is applied."""

    def __init__(self, after: int, error: BaseException, applied: bool) -> None:
        self.left, self.error, self.applied, self.fired = after, error, applied, False

    def apply(self, kernel: Kernel, change: Change, seen: Observed, fd: int | None = None) -> None:
        if self.fired or self.left:
            self.left -= 1
            APPLY(kernel, change, seen, fd)
            return
        self.fired = True
        if self.applied:
            APPLY(kernel, change, seen, fd)
        raise self.error


def fail_at(
    monkeypatch: pytest.MonkeyPatch, number: int, applied: bool, error: BaseException
) -> Fault:
    fault = Fault(number, error, applied)
    monkeypatch.setattr(
        Kernel, "apply", lambda kernel, change, seen, fd=None: fault.apply(kernel, change, seen, fd)
    )
    return fault


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("step", ["attach", "change", "detach"])
def test_a_fault_at_every_change_is_undone(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch, step: str, applied: bool
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    if step != "attach":
        attach(host, dev)
    before, before_state = snapshot(host, dev), state(host, dev)
    for number in itertools.count():
        fault = fail_at(monkeypatch, number, applied, InjectedError("fault", hint="none"))
        with contextlib.suppress(InjectedError):
            if step == "detach":
                detach(host, dev)
            else:
                attach(host, dev, "2gbit" if step == "change" else "1gbit")
        if not fault.fired:
            break
        after = snapshot(host, dev)
        if step == "detach":  # the program is the same, its filter a new one
            assert sorted(after["class"].splitlines()) == sorted(before["class"].splitlines())
            assert after["egress"] == before["egress"]
        else:
            assert after == before, f"change {number}"
        assert state(host, dev) == before_state
    assert number == {"attach": 24, "change": 15, "detach": 2}[step]


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("error", [FeatureMissing("no bfifo", hint="none"), KeyboardInterrupt()])
def test_the_cause_stays_visible(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    fail_at(monkeypatch, 5, False, error)
    with pytest.raises(type(error)):
        attach(host, dev)
    assert snapshot(host, dev) == before


@pytest.mark.usefixtures("compiled_once")
def test_somebody_who_undoes_it_meanwhile_is_noticed(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)

    def meddle(kernel: Kernel, change: Change, seen: Observed, fd: int | None = None) -> None:
        APPLY(kernel, change, seen, fd)
        if "(default): rate" in change.describe():  # the last change
            host.run("tc", "qdisc", "delete", "dev", dev, "parent", "7150:12")

    monkeypatch.setattr(Kernel, "apply", meddle)
    with pytest.raises(ApplyError, match=r"did not keep what was set.*7162:"):
        attach(host, dev)
    assert snapshot(host, dev) == before


@pytest.mark.usefixtures("compiled_once")
def test_the_interface_disappears_half_way(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    count = itertools.count()

    def unplug(kernel: Kernel, change: Change, seen: Observed, fd: int | None = None) -> None:
        if next(count) == 7:
            host.run("ip", "link", "delete", dev)
        APPLY(kernel, change, seen, fd)

    monkeypatch.setattr(Kernel, "apply", unplug)
    with pytest.raises(HostError, match="disappeared"):
        attach(host, dev)


@pytest.mark.usefixtures("compiled_once")
def test_an_interface_that_goes_while_it_is_read_has_not_drifted(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    dump, applied = Kernel._dump, list[Change]()

    def unplug(kernel: Kernel, *asked: int) -> list[tcmsg]:
        if applied:  # by now it is read to see whether the changes took effect
            host.run("ip", "link", "delete", dev, check=False)
        return dump(kernel, *asked)

    def note(kernel: Kernel, change: Change, seen: Observed, fd: int | None = None) -> None:
        APPLY(kernel, change, seen, fd)
        if "(default): rate" in change.describe():  # the last change
            applied.append(change)

    monkeypatch.setattr(Kernel, "_dump", unplug)
    monkeypatch.setattr(Kernel, "apply", note)
    with pytest.raises(InterfaceMissing, match="disappeared"):
        attach(host, dev)


def test_an_interface_renamed_before_its_driver_is_asked_is_said_to_be_gone(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev

    def rename(asked: str) -> IoctlEthtool:
        host.run("ip", "link", "set", "dev", dev, "name", "other0", check=False)
        return IoctlEthtool(asked)

    monkeypatch.setattr(device, "IoctlEthtool", rename)
    with pytest.raises(InterfaceMissing, match="disappeared"):
        attach(host, dev)


@pytest.mark.usefixtures("compiled_once")
def test_a_foreign_root_that_was_replaced_cannot_come_back_and_that_is_said(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    host.run("tc", "qdisc", "add", "dev", dev, "root", "handle", "9:", "pfifo", "limit", "100")
    fail_at(monkeypatch, 5, False, ApplyError("injected", hint="none"))
    with pytest.raises(ApplyError, match="pfifo cannot be restored"):
        attach(host, dev, replace_root=True)
    assert snapshot(host, dev) == before


@pytest.mark.usefixtures("compiled_once")
def test_two_attaches_at_once_take_turns(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(attach(host, dev).result)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["attached", "unchanged", "unchanged", "unchanged"]
    assert state(host, dev) == "attached"


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("hook", ["ingress", "egress"])
@pytest.mark.parametrize("classifier", ["bpf", pytest.param("u32", marks=pytest.mark.stock_kernel)])
def test_a_filter_added_while_detaching_survives(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch, hook: str, classifier: str
) -> None:
    """It comes after detach has read the link, and before clsact goes."""
    host, dev = netns_pair.a, netns_pair.a.dev
    if classifier == "u32" and not probe().skbedit:
        pytest.skip(
            "kernel lacks skbedit: u32 filters are at the root then, and clsact is not there"
        )
    attach(host, dev, classifier=classifier)

    def add() -> None:
        theirs = f"filter add dev {dev} {hook} protocol ip pref 5 u32 match u32 0 0"
        host.run("tc", *theirs.split())

    def race(kernel: Kernel, change: Change, seen: Observed, fd: int | None = None) -> None:
        if isinstance(change, DelClsact):
            somebody = threading.Thread(target=add)
            somebody.start()
            somebody.join()
        APPLY(kernel, change, seen, fd)

    monkeypatch.setattr(Kernel, "apply", race)
    assert detach(host, dev).result == "detached"
    after = snapshot(host, dev)
    assert "pref 5 u32" in after[hook]
    assert "htb" not in after["qdisc"]
    assert "tlsched" not in after["egress"]
    assert state(host, dev) == "detached"
