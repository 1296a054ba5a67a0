"""What somebody else put in the way of attach is refused before anything is written."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.kernel.hostcli import attach, detach, snapshot, state, status, tlsched
from tests.netns import Namespace, Pair
from tlsched.errors import ApplyError, ForeignQdisc, HostError
from tlsched.tc.changes import Change, SetFilter
from tlsched.tc.kernel import Kernel
from tlsched.tc.observed import Observed

pytestmark = pytest.mark.root
APPLY = Kernel.apply

ALL_IP = "protocol ip u32 match u32 0 0"
IN_THE_WAY = {
    "ingress": (["qdisc add dev {dev} ingress"], "ingress ffff:"),
    "u32 where the classifier goes": (
        ["qdisc add dev {dev} clsact", f"filter add dev {{dev}} egress pref 29008 {ALL_IP}"],
        "u32",
    ),
    "shared egress block": (["qdisc add dev {dev} egress_block 23 clsact"], "block"),
    "htb of our handle": (["qdisc add dev {dev} root handle 7150: htb default 10"], "htb 7150:"),
    "htb of our handle and default": (
        [
            "qdisc add dev {dev} root handle 7150: htb default 16",
            "class add dev {dev} parent 7150: classid 7150:16 htb rate 1mbit",
        ],
        "htb 7150:",
    ),
}


def uncounted(host: Namespace, dev: str) -> dict[str, str]:
    """A snapshot without the one counter that tc shows even where no statistics are asked for."""
    return {
        key: re.sub(r"direct_packets_stat \d+", "", text)
        for key, text in snapshot(host, dev).items()
    }


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_it_is_named_and_left_alone(netns_pair: Pair, what: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    commands, named = IN_THE_WAY[what]
    for command in commands:
        host.run("tc", *command.format(dev=dev).split())
    before = uncounted(host, dev)
    dry = tlsched(host, "attach", "--iface", dev, "--rate", "1gbit", "--dry-run", code=2)
    assert named in dry.stderr
    with pytest.raises(ForeignQdisc, match=named):
        attach(host, dev)
    assert state(host, dev) == "detached"
    assert detach(host, dev).result == "unchanged"
    assert uncounted(host, dev) == before


def test_no_filter_is_sent_after_clsact_was_refused(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody adds ingress between our reading and our writing."""
    host, dev = netns_pair.a, netns_pair.a.dev

    def race(kernel: Kernel, change: Change, seen: Observed, fd: int | None = None) -> None:
        if isinstance(change, SetFilter):
            host.run("tc", "qdisc", "add", "dev", dev, "ingress")
        APPLY(kernel, change, seen, fd)

    monkeypatch.setattr(Kernel, "apply", race)
    with pytest.raises(ApplyError, match="exists"):
        attach(host, dev)
    assert "tlsched" not in host.run("tc", "filter", "show", "dev", dev, "ingress").stdout


def test_an_htb_of_a_killed_attach_is_ours(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    host.run("tc", "qdisc", "add", "dev", dev, "root", "handle", "7150:", "htb", "default", "16")
    assert state(host, dev) == "drifted"
    attach(host, dev)
    assert state(host, dev) == "attached"
    detach(host, dev)
    assert snapshot(host, dev) == before


def test_a_filter_at_our_root_is_drift_and_mended(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    attach(host, dev)
    theirs = f"filter add dev {dev} parent 7150: prio 5 {ALL_IP} flowid 7150:10"
    host.run("tc", *theirs.split())
    (link,) = status(host)
    assert link.state == "drifted"
    (line,) = link.drift
    assert "u32 prio 5" in line.what
    attach(host, dev)
    assert state(host, dev) == "attached"
    detach(host, dev)
    assert snapshot(host, dev) == before


@pytest.mark.parametrize("fails", [False, True])
def test_an_interface_renamed_meanwhile(netns_pair: Pair, fails: bool) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    default = snapshot(host, dev)["qdisc"]

    def rename(kernel: Kernel, change: Change, seen: Observed, fd: int | None = None) -> None:
        APPLY(kernel, change, seen, fd)
        if isinstance(change, SetFilter):
            host.run("ip", "link", "set", dev, "name", "other0")
            if fails:
                raise HostError("injected", hint="none")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "apply", rename)
        if fails:
            with pytest.raises(HostError, match="injected"):
                attach(host, dev)
        else:
            attach(host, dev)
    assert state(host, "other0") == ("detached" if fails else "attached")
    detach(host, "other0")
    assert snapshot(host, "other0")["qdisc"].replace("other0", dev) == default


@pytest.mark.stock_kernel
@pytest.mark.parametrize("side", ["ingress_block", "egress_block"])
@pytest.mark.lengthy
def test_a_clsact_that_shares_a_block_is_not_deleted(netns_pair: Pair, side: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    host.run("tc", "qdisc", "delete", "dev", dev, "clsact")
    host.run("tc", "qdisc", "add", "dev", dev, side, "23", "clsact")
    detach(host, dev)
    left = snapshot(host, dev)["qdisc"]
    assert f"{side} 23" in left
    assert "htb" not in left


def test_attach_needs_no_temporary_folder(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    attach(host, dev)
    assert state(host, dev) == "attached"
