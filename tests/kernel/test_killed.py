"""Killed after any change: the link still carries traffic, and the next command ends clean."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Callable

import pytest

from tests.kernel.hostcli import attach, detach, snapshot, state
from tests.kernel.trees import DEV, KINDS, Kind, link_for
from tests.netns import Namespace
from tests.tc.traffic import mark
from tlsched.bands import all_bands
from tlsched.config import LinkSettings, parse_rate
from tlsched.tc.changes import Change
from tlsched.tc.kernel import Kernel
from tlsched.tc.observed import Observed

pytestmark = [
    pytest.mark.root,
    pytest.mark.usefixtures("compiled_once"),
]
Make = Callable[[], Namespace]


def run_until(host: Namespace, changes: int, command: str, kind: Kind) -> bool:
    """Run a command in a child that is killed right after so many changes; False if it ended."""
    child = host.spawn(_run, changes, command, kind)
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def _run(changes: int, command: str, kind: Kind) -> None:
    from tlsched import control

    done = itertools.count(1)
    apply = Kernel.apply

    def counted(kernel: Kernel, change: Change, seen: Observed, fd: int | None = None) -> None:
        apply(kernel, change, seen, fd)
        if next(done) == changes:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Kernel, "apply", counted)  # noqa: B010  # mypy takes no other; in this child alone
    if command == "detach":
        control.detach(DEV)
        return
    settings = dict(kind.settings if command == "attach" else kind.other)
    rate = settings.pop("rate")
    control.attach(LinkSettings(DEV, rate and parse_rate(rate), **settings))


def carries(a: Namespace, b: Namespace) -> None:
    """A packet of every band arrives."""
    receiver = b.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("10.99.0.2", 0))
    receiver.settimeout(5)
    with receiver:
        for band in all_bands():
            sender = a.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
            with sender:
                mark(sender, band)
                sender.sendto(band.name.encode(), receiver.getsockname())
            assert receiver.recv(100) == band.name.encode()


@pytest.mark.parametrize("command", ["attach", "change", "detach"])
@pytest.mark.parametrize("name", ["htb", pytest.param("ets", marks=pytest.mark.stock_kernel)])
def test_killed_after_each_change(make_netns: Make, name: str, command: str) -> None:
    kind = KINDS[name]
    a, b = link_for(kind, make_netns)
    before = snapshot(a, DEV)
    for number in itertools.count(1):
        if command != "attach":
            attach(a, DEV, **kind.settings)
        if not run_until(a, number, command, kind):
            break
        carries(a, b)
        if number % 2:
            attach(a, DEV, **kind.settings)
            assert state(a, DEV) == "attached"
        detach(a, DEV)
        assert snapshot(a, DEV) == before, f"after change {number}"
    assert number > 1


def test_clsact_and_its_filter_are_one_system_call(
    make_netns: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two calls a kill would leave an empty clsact, which nobody could tell from others'.

    The kernel handles all messages of one call before the caller can die (netlink_rcv_skb).
    """
    a, _ = link_for(KINDS["htb"], make_netns)
    calls: list[int] = []

    def counted(kernel: Kernel, batch: list[object]) -> None:
        calls.append(len(batch))
        send(kernel, batch)

    send = Kernel._send  # the one place that writes
    monkeypatch.setattr(Kernel, "_send", counted)
    attach(a, DEV)
    assert calls[0] == 2
