"""What somebody else configured on the link is left alone, and what he changes is noticed."""

from __future__ import annotations

import pytest

from tests.kernel.hostcli import attach, detach, snapshot, state, status, tlsched, tlsched_json
from tests.netns import Pair
from tlsched.errors import ForeignQdisc

pytestmark = pytest.mark.root

TBF = ["tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"]
U32 = ["protocol", "ip", "pref", "5", "u32", "match", "u32", "0", "0", "flowid", "1:1"]


def test_a_foreign_root_is_refused_unless_told_otherwise(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    default = snapshot(host, dev)
    host.run("tc", "qdisc", "add", "dev", dev, "root", "handle", "9:", *TBF)
    foreign = snapshot(host, dev)
    rate = ["--iface", dev, "--rate", "1gbit"]
    done = tlsched(host, "attach", *rate, code=2)
    assert "tbf 9:" in done.stderr
    assert "--replace-root" in done.stderr
    assert snapshot(host, dev) == foreign
    assert detach(host, dev).result == "unchanged"
    assert snapshot(host, dev) == foreign

    dry = tlsched_json(host, "attach", *rate, "--replace-root", "--dry-run")
    assert any("in place of somebody's tbf" in line for line in dry["changes"])
    attach(host, dev, replace_root=True)
    assert state(host, dev) == "attached"
    detach(host, dev)
    assert snapshot(host, dev) == default


@pytest.mark.parametrize("handle", ["7150:", "7151:"])
def test_a_foreign_root_of_any_handle_is_replaced(netns_pair: Pair, handle: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    host.run("tc", "qdisc", "add", "dev", dev, "root", "handle", handle, *TBF)
    attach(host, dev, replace_root=True)
    assert state(host, dev) == "attached"


@pytest.mark.parametrize("hook", ["ingress", "egress"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_others_filters_survive(netns_pair: Pair, hook: str, when: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    theirs = [["tc", "filter", "add", "dev", dev, hook, *U32]]
    if when == "before":
        host.run("tc", "qdisc", "add", "dev", dev, "clsact")
        host.run(*theirs[0])
        before = snapshot(host, dev)
        attach(host, dev)
    else:
        attach(host, dev)
        host.run(*theirs[0])
    detach(host, dev)
    after = snapshot(host, dev)
    if when == "before":
        assert after == before
    assert "u32" in after[hook]
    assert "clsact" in after["qdisc"]
    assert "htb" not in after["qdisc"]
    assert "tlsched" not in after["egress"]


@pytest.mark.stock_kernel
@pytest.mark.lengthy
def test_an_empty_clsact_that_was_there_before_survives(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    host.run("tc", "qdisc", "add", "dev", dev, "clsact")
    before = snapshot(host, dev)
    attach(host, dev)
    attach(host, dev, "2gbit")
    detach(host, dev)
    assert snapshot(host, dev) == before


DRIFTS = {
    "link class": "class change dev {dev} classid 7150:1 htb rate 500mbit",
    "lane class": "class change dev {dev} parent 7150:1 classid 7150:12 htb rate 1mbit ceil 1gbit",
    "default class": "class change dev {dev} parent 7150:1 classid 7150:16 htb rate 1mbit",
    "stray class": "class add dev {dev} parent 7150:1 classid 7150:99 htb rate 1mbit",
    "leaf removed": "qdisc delete dev {dev} parent 7150:11",
    "leaf limit": "qdisc change dev {dev} parent 7150:11 handle 7161: bfifo limit 3000",
    "leaf kind": "qdisc replace dev {dev} parent 7150:11 handle 99: pfifo limit 10",
    "filter deleted": "filter delete dev {dev} egress",
    "clsact deleted": "qdisc delete dev {dev} clsact",
    "root deleted": "qdisc delete dev {dev} root",
    "foreign root": "qdisc replace dev {dev} root handle 9: pfifo limit 100",
}


@pytest.mark.parametrize("kind", DRIFTS)
def test_drift_is_noticed_and_mended(netns_pair: Pair, kind: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    attach(host, dev)
    host.run("tc", *DRIFTS[kind].format(dev=dev).split())
    (link,) = status(host)
    assert link.state == "drifted"
    assert link.drift
    foreign = kind == "foreign root"
    if foreign:
        with pytest.raises(ForeignQdisc, match="pfifo 9:"):
            attach(host, dev)
    attach(host, dev, replace_root=foreign)
    assert state(host, dev) == "attached"
    detach(host, dev)
    assert snapshot(host, dev) == before


def test_drift_has_its_own_exit_code_and_says_what_drifted(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    host.run("tc", "filter", "delete", "dev", dev, "egress")
    said = tlsched(host, "status", "--iface", dev, code=4).stdout
    assert "classifier at clsact egress is absent" in said


def test_a_link_is_detached_if_it_has_drifted(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before, wanted = snapshot(host, dev), ("detach", "--iface", dev, "--if-drifted")
    tlsched(host, *wanted, code=3)
    attach(host, dev)
    assert "attached" in tlsched(host, *wanted).stdout
    assert tlsched_json(host, *wanted)["result"] == "unchanged"
    assert state(host, dev) == "attached"
    host.run("tc", "qdisc", "delete", "dev", dev, "parent", "7150:11")
    said = tlsched(host, *wanted, code=4).stdout
    assert "drift: " in said
    assert f"{dev}: detached" in said
    assert snapshot(host, dev) == before


@pytest.mark.parametrize("kind", DRIFTS)
def test_a_drifted_link_can_be_detached(netns_pair: Pair, kind: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    attach(host, dev)
    host.run("tc", *DRIFTS[kind].format(dev=dev).split())
    detach(host, dev)
    if kind == "foreign root":
        assert "pfifo 9:" in snapshot(host, dev)["qdisc"]
    else:
        assert snapshot(host, dev) == before
