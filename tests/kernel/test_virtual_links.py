"""VLAN and bond devices: where the tree goes, and the band that tagged packets take."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ebpf import wire
from tests.kernel.hostcli import attach, detach, snapshot, state, status
from tests.netns import SLOWNESS, Namespace, Pair
from tlsched.bands import DEFAULT_BAND, Band, lane_bands
from tlsched.errors import ForeignQdisc

pytestmark = [pytest.mark.root, pytest.mark.stock_kernel]

COUNT = 5
PORT = 7150
LANE = lane_bands()[1]


def try_to(host: Namespace, *argv: str, feature: str) -> None:
    """Run a command that needs a kernel feature; skip where the kernel has no such thing."""
    done = host.run(*argv, check=False)
    if "Unknown device type" in done.stderr or "qdisc kind is unknown" in done.stderr:
        pytest.skip(f"kernel lacks {feature}")
    assert done.returncode == 0, done.stderr


def add_vlan(pair: Pair, lower: str, name: str, tag: int, protocol: str = "802.1Q") -> None:
    """A VLAN device on both ends, named alike, with 10.TAG.0.1 and .2."""
    for host, end in enumerate((pair.a, pair.b), start=1):
        kind = ("type", "vlan", "protocol", protocol, "id", str(tag))
        try_to(end, "ip", "link", "add", "link", lower, "name", name, *kind, feature="VLAN devices")
        end.run("ip", "address", "add", f"10.{tag}.0.{host}/24", "dev", name)
        end.run("ip", "link", "set", name, "addrgenmode", "none", "up")


def send(host: Namespace, address: str, lane: Band | None) -> None:
    """A few datagrams to the other end, with a lane's marks or none."""
    with host.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as sock:
        if lane is not None:
            wire.mark(sock, lane)
        for number in range(COUNT):
            sock.sendto(b"datagram %d" % number, (address, PORT))


def sent(host: Namespace, dev: str, expected: dict[str, int]) -> dict[str, int]:
    """Packets that the lanes of an attached link sent, once they are the ``expected`` ones.

    The first datagrams to an address wait for its neighbour entry: a few seconds are granted.
    """
    deadline_s = time.monotonic() + 5 * SLOWNESS
    while True:
        (link,) = status(host, dev)
        seen = {band.name: band.packets for band in link.bands if band.name != DEFAULT_BAND}
        if seen == expected or time.monotonic() > deadline_s:
            return seen
        time.sleep(0.05)


def only(lane: Band, packets: int = COUNT) -> dict[str, int]:
    """What :func:`sent` counts when nothing but ``lane`` was used."""
    return {each.name: packets if each == lane else 0 for each in lane_bands()}


def test_tagged_packets_take_their_band_on_the_lower_device(netns_pair: Pair) -> None:
    """One tag beside the packet, and one in front of another that is inside it (802.1ad)."""
    host, dev = netns_pair.a, netns_pair.a.dev
    add_vlan(netns_pair, dev, f"{dev}.100", 100)
    add_vlan(netns_pair, dev, "outer", 200, "802.1ad")
    add_vlan(netns_pair, "outer", "outer.42", 42)
    attach(host, dev)
    send(host, "10.100.0.2", LANE)
    assert sent(host, dev, only(LANE)) == only(LANE)
    send(host, "10.42.0.2", LANE)
    assert sent(host, dev, only(LANE, 2 * COUNT)) == only(LANE, 2 * COUNT)
    send(host, "10.100.0.2", None)
    send(host, "10.42.0.2", None)
    assert sent(host, dev, only(LANE, 2 * COUNT)) == only(LANE, 2 * COUNT)


def test_a_vlan_device_is_attached_over_somebodys_netem(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    vlan = f"{dev}.100"
    add_vlan(netns_pair, dev, vlan, 100)
    netem = ("netem", "delay", "1ms", "limit", "1000")
    try_to(host, "tc", "qdisc", "add", "dev", dev, "root", *netem, feature="netem")
    before, below = snapshot(host, vlan), snapshot(host, dev)
    attach(host, vlan)
    send(host, "10.100.0.2", LANE)
    assert sent(host, vlan, only(LANE)) == only(LANE)
    assert state(host, dev) == "detached"
    detach(host, vlan)
    assert snapshot(host, vlan) == before
    assert snapshot(host, dev) == below


def test_a_bonds_slaves_are_attached(netns_pair: Pair) -> None:
    """The lanes go where the bond sends them, and with it to the other slave."""
    host, other = netns_pair.a, netns_pair.b
    second = ("ip", "-n", host.name, "link", "add", "eth1", "type", "veth")
    host.run(*second, "peer", "name", "eth1", "netns", other.name)
    bond = ("type", "bond", "mode", "active-backup", "miimon", "100")
    for number, end in enumerate((host, other), start=1):
        try_to(end, "ip", "link", "add", "bond0", *bond, feature="bond devices")
        for slave in ("eth0", "eth1"):
            end.run("ip", "link", "set", slave, "down")
            end.run("ip", "link", "set", slave, "master", "bond0")
        end.run("ip", "address", "add", f"10.150.0.{number}/24", "dev", "bond0")
        end.run("ip", "link", "set", "bond0", "addrgenmode", "none", "up")
    for slave in ("eth0", "eth1"):
        attach(host, slave)
    active = active_slave(host)
    send(host, "10.150.0.2", LANE)
    assert sent(host, active, only(LANE)) == only(LANE)
    spare = ({"eth0", "eth1"} - {active}).pop()
    assert sent(host, spare, only(LANE, 0)) == only(LANE, 0)
    host.run("ip", "link", "set", "dev", "bond0", "type", "bond", "active_slave", spare)
    other.run("ip", "link", "set", "dev", "bond0", "type", "bond", "active_slave", spare)
    send(host, "10.150.0.2", LANE)
    assert sent(host, active, only(LANE)) == only(LANE)
    assert sent(host, spare, only(LANE)) == only(LANE)
    for slave in ("eth0", "eth1"):
        detach(host, slave)
        assert state(host, slave) == "detached"


def active_slave(host: Namespace) -> str:
    shown = host.run("ip", "-json", "-details", "link", "show", "bond0").stdout
    name: str = json.loads(shown)[0]["linkinfo"]["info_data"]["active_slave"]
    return name


@pytest.mark.parametrize("kind", ["fq", "fq_codel", "cake", "sfq", "drr", "hfsc", "red"])
@pytest.mark.lengthy
def test_a_root_of_any_kind_is_somebodys(netns_pair: Pair, kind: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    options = {"red": ("limit", "400000", "avpkt", "1000")}.get(kind, ())
    root = ("tc", "qdisc", "add", "dev", dev, "root", "handle", "9:", kind)
    try_to(host, *root, *options, feature=f"{kind} qdiscs")

    def configured() -> dict[str, str]:
        shown = snapshot(host, dev)
        if kind in ("fq_codel", "cake", "sfq"):
            del shown["class"]  # the flows that have sent something: they come and go
        return shown

    before = configured()
    with pytest.raises(ForeignQdisc, match=f"{kind} 9:"):
        attach(host, dev)
    assert state(host, dev) == "detached"
    assert detach(host, dev).result == "unchanged"
    assert configured() == before


def test_the_default_of_a_device_that_queues_comes_back(
    make_netns: Callable[[], Namespace],
) -> None:
    """net.core.default_qdisc: pfifo_fast, or fq_codel where systemd set it; its handle is 0."""
    host = make_netns()
    host.run("ip", "link", "add", "ifb0", "type", "ifb")
    host.run("ip", "link", "set", "ifb0", "up")
    before = snapshot(host, "ifb0")
    assert Path("/proc/sys/net/core/default_qdisc").read_text().strip() in before["qdisc"]
    attach(host, "ifb0")
    assert state(host, "ifb0") == "attached"
    detach(host, "ifb0")
    assert snapshot(host, "ifb0") == before
