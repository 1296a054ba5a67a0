"""What `status` reads of a link that carries traffic, and how it names what drifted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from tests.kernel.hostcli import attach, status, tlsched, tlsched_json
from tests.netns import Pair
from tests.tc.traffic import mark
from tlsched.bands import Band, all_bands
from tlsched.linkstatus import BandStatus, LinkStatus
from tlsched.tc.changes import AddRoot, DelRoot
from tlsched.tc.drift import of_changes
from tlsched.tc.lock import interface_lock
from tlsched.tc.options import Htb

root = pytest.mark.root

# What a tool of somebody else's may do to the link, and what status says then.
DRIFTS = {
    "class change dev {dev} classid 7150:1 htb rate 500mbit": (
        "rate of class 7150:1 (link)",
        "500mbit",
        "1gbit",
    ),
    "class add dev {dev} parent 7150:1 classid 7150:99 htb rate 1mbit": (
        "class 7150:99",
        "there",
        "absent",
    ),
    "qdisc change dev {dev} parent 7150:11 handle 7161: bfifo limit 3000": (
        "limit of the queue of class 7150:11 (lane1)",
        "3000 bytes",
        "1000000 bytes",
    ),
    "qdisc replace dev {dev} parent 7150:11 handle 99: pfifo limit 10": (
        "queue of class 7150:11 (lane1)",
        "pfifo",
        "bfifo 7161: limit 1000000 bytes",
    ),
    "filter delete dev {dev} egress": ("classifier at clsact egress", "absent", "there"),
    "qdisc replace dev {dev} root handle 9: pfifo limit 100": (
        "root qdisc",
        "pfifo 9:",
        "one of tlsched's (7150:)",
    ),
}


def send(pair: Pair, band: Band | None, datagrams: int) -> None:
    """Send marked datagrams of 1000 bytes from a to b."""
    sock = pair.a.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        mark(sock, band)
        for _ in range(datagrams):
            sock.sendto(bytes(1000), (pair.b.v4, 9))


@root
@pytest.mark.parametrize("command", DRIFTS)
def test_drift_says_what_is_and_what_should_be(netns_pair: Pair, command: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    host.run("tc", *command.format(dev=dev).split())
    (link,) = tlsched_json(host, "status", code=4)
    what, is_now, should_be = DRIFTS[command]
    assert {"what": what, "is": is_now, "should_be": should_be} in link["drift"]
    line = f"drift: {what} is {is_now}, should be {should_be}"
    assert line in tlsched(host, "status", code=4).stdout


@root
def test_a_missing_class_is_named_once(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    host.run("tc", "class", "delete", "dev", dev, "classid", "7150:13")
    (link,) = status(host)
    assert [str(drift) for drift in link.drift] == [
        "class 7150:13 (lane3) is absent, should be there"
    ]


@root
def test_a_link_has_one_name_in_what_is_read(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    host.run("ip", "link", "property", "add", "dev", dev, "altname", "fabric0")
    attach(host, "fabric0")
    assert [link.iface for link in status(host, "fabric0")] == [dev]


@root
def test_a_link_that_is_being_changed_is_not_drifted(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    limit = ["tc", "qdisc", "change", "dev", dev, "parent", "7150:11", "handle", "7161:", "bfifo"]
    states: list[str] = []
    reader = threading.Thread(
        target=lambda: states.extend(link.state for link in status(host, dev))
    )
    with contextlib.ExitStack() as changing:
        host.call(
            changing.enter_context, interface_lock(host.call(socket.if_nametoindex, dev), dev)
        )
        host.run(*limit, "limit", "3000")
        reader.start()
        time.sleep(0.2)  # the reader has seen it by then, or will see the end of the change
        host.run(*limit, "limit", "1000000")
    reader.join()
    assert states == ["attached"]


def test_a_tree_to_be_built_anew_is_one_line() -> None:
    (drift,) = of_changes([DelRoot("htb", 0x71500000), AddRoot(0x71500000, Htb(0x16), None)])
    assert drift.what == "root qdisc"


@root
def test_status_says_how_much_no_lane_claimed(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    send(netns_pair, all_bands()[0], 300)
    send(netns_pair, None, 100)
    (link,) = tlsched_json(host, "status")
    assert link["default_share"] == 0.05
    assert link["unclassified_share"] == pytest.approx(0.25, abs=0.02)  # ARP and MLD are guests
    assert "no lane claimed 2" in tlsched(host, "status").stdout


def test_the_unclassified_share_before_the_first_packet_is_unknown() -> None:
    bands = tuple(BandStatus(band.name, None, None, 0, 0, 0, 0) for band in all_bands())
    link = LinkStatus("eth0", "attached", 10**9, "htb", "bpf", bands)
    assert link.as_dict()["unclassified_share"] is None
