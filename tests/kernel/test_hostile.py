"""A hostile neighbour claims lanes by every way there is; those who are trusted do the same beside.

What the trusted ones bring into the lanes alone is measured first; with the neighbour beside them
it must be the same, to the packet.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests import cgrouptree
from tests.ebpf import wire
from tests.kernel.claims import Path4and6, claim_everything
from tests.kernel.neighbourhood import TCP, Wire, attach, build, introduce, run_all, seen
from tests.netns import Namespace, Pair
from tlsched.bands import Band, lane_bands
from tlsched.trust import ANY_LOCAL, make_trust

pytestmark = pytest.mark.root


@pytest.fixture
def group() -> Iterator[Path]:
    """The trusted cgroup."""
    with cgrouptree.cgroup() as path:
        yield path


def test_nothing_of_a_neighbour_gets_into_a_lane(
    netns_pair: Pair, make_netns: Callable[[], Namespace], group: Path
) -> None:
    cluster = build(netns_pair, [make_netns(), make_netns()])
    host = cluster.host
    attach(host, make_trust(["/" + group.name], sources=["10.78.1.0/24", "fd78:1::/64"]))

    def start(where: Namespace, cgroup: Path | None = None) -> BaseProcess:
        path = cluster.path(where)
        return where.spawn(claim_everything, cgroup, path, where == host)

    before = seen(host)
    run_all(start(host, group), start(cluster.trusted))
    alone = seen(host).since(before)
    assert alone.lanes == alone.classes
    assert min(alone.lanes.values()) > 100
    assert alone.refused == 0

    before = seen(host)
    with Wire(cluster.far, "eth0") as arrived:
        run_all(start(host), start(cluster.foreign))
    hostile = seen(host).since(before)
    assert set(hostile.lanes.values()) == set(hostile.classes.values()) == {0}
    assert hostile.refused > sum(alone.lanes.values())
    assert arrived.packets > hostile.refused
    assert (arrived.lane_dscps, arrived.wrong_ecn, arrived.wrong_checksums) == (0, 0, 0)

    before = seen(host)
    trusted = (start(host, group), start(cluster.trusted))
    run_all(*trusted, start(host), start(cluster.foreign))
    together = seen(host).since(before)
    assert (together.lanes, together.classes) == (alone.lanes, alone.classes)
    assert together.refused == hostile.refused


def send_marked(to: str, lane: Band, cgroup: Path | None, uid: int = 0) -> None:
    """One datagram with both marks; run in a process of its own."""
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    os.setuid(uid)
    with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        wire.mark(sock, lane)
        sock.sendto(b"marked", (to, 7150))


def lane_packets(host: Namespace, send: Callable[[], object]) -> int:
    """How many packets ``send`` brings into any lane."""
    before = seen(host)
    send()
    return sum(seen(host).since(before).lanes.values())


@pytest.mark.stock_kernel
def test_a_change_of_trust_takes_effect_on_open_sockets(netns_pair: Pair, group: Path) -> None:
    host, lane = netns_pair.a, lane_bands()[3]
    introduce(netns_pair)
    attach(host, ANY_LOCAL)
    program_id = seen(host).program_id
    with host.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as sock:
        wire.mark(sock, lane)

        def send() -> None:
            sock.sendto(b"marked", (netns_pair.b.v4, 7150))

        trusts = ((ANY_LOCAL, 1), (make_trust(["/" + group.name]), 0), (make_trust(uids=[0]), 1))
        for trust, expected in (*trusts, (make_trust(uids=[1]), 0), (make_trust(["/"]), 1)):
            attach(host, trust)
            assert lane_packets(host, send) == expected, trust
    assert seen(host).program_id == program_id


@pytest.mark.stock_kernel
@pytest.mark.lengthy
def test_a_uid_is_the_owner_of_the_socket(netns_pair: Pair) -> None:
    host, lane = netns_pair.a, lane_bands()[0]
    introduce(netns_pair)
    attach(host, make_trust(uids=[4242]))

    def send_as(uid: int) -> None:
        run_all(host.spawn(send_marked, netns_pair.b.v6, lane, None, uid))

    assert lane_packets(host, lambda: send_as(4242)) == 1
    assert lane_packets(host, lambda: send_as(4243)) == 0
    assert lane_packets(host, lambda: send_as(0)) == 0


@pytest.mark.stock_kernel
@pytest.mark.lengthy
def test_below_a_trusted_cgroup_is_trusted_and_above_is_not(netns_pair: Pair, group: Path) -> None:
    host, below = netns_pair.a, group / "job" / "worker"
    below.mkdir(parents=True)
    introduce(netns_pair)
    attach(host, make_trust([f"/{group.name}/job"]))

    def send_from(cgroup: Path) -> None:
        run_all(host.spawn(send_marked, netns_pair.b.v4, lane_bands()[5], cgroup))

    assert lane_packets(host, lambda: send_from(below)) == 1
    assert lane_packets(host, lambda: send_from(below.parent)) == 1
    assert lane_packets(host, lambda: send_from(group)) == 0


def test_a_container_on_macvlan_is_judged_by_its_cgroup(
    netns_pair: Pair, make_netns: Callable[[], Namespace], group: Path
) -> None:
    """Its packets reach the link with socket and priority, as if the host had sent them."""
    host, container = netns_pair.a, make_netns()
    introduce(netns_pair)
    attach(host, make_trust(["/" + group.name]))
    kind = ("link", "eth0", "name", "mv0", "netns", container.name, "type", "macvlan")
    host.run("ip", "link", "add", *kind)
    container.run("ip", "link", "set", "mv0", "addrgenmode", "none", "up")
    container.run("ip", "address", "add", "10.99.0.7/24", "dev", "mv0")
    neighbour = (netns_pair.b.v4, "lladdr", netns_pair.b.mac, "dev", "mv0")
    container.run("ip", "neighbour", "replace", *neighbour)

    def send_from(cgroup: Path) -> None:
        run_all(container.spawn(send_marked, netns_pair.b.v4, lane_bands()[1], cgroup))

    assert lane_packets(host, lambda: send_from(group.parent)) == 0
    assert seen(host).refused == 1
    assert lane_packets(host, lambda: send_from(group)) == 1


def test_behind_a_bridge_the_host_is_local_and_a_container_is_not(
    netns_pair: Pair, make_netns: Callable[[], Namespace], group: Path
) -> None:
    """The link is a port of a bridge: whole frames of the container pass, with tags of its own."""
    host, far, container, dev = netns_pair.a, netns_pair.b, make_netns(), netns_pair.a.dev
    host.run("ip", "link", "add", "br0", "type", "bridge")
    veth = ("type", "veth", "peer", "name", "eth0", "netns", container.name)
    host.run("ip", "link", "add", "c1", *veth)
    host.run("ip", "address", "flush", "dev", dev)
    for port in (dev, "c1"):
        host.run("ip", "link", "set", port, "addrgenmode", "none", "master", "br0", "up")
    own, other = ("10.99.0.1", "fd99::1"), ("10.99.0.7", "fd99::7")
    for where, name, addresses in ((host, "br0", own), (container, "eth0", other)):
        where.run("ip", "link", "set", name, "addrgenmode", "none", "up")
        for address, length, peer in zip(addresses, (24, 64), (far.v4, far.v6), strict=True):
            dad = ("nodad",) if ":" in address else ()
            where.run("ip", "address", "add", f"{address}/{length}", "dev", name, *dad)
            where.run("ip", "neighbour", "replace", peer, "lladdr", far.mac, "dev", name)
    attach(host, make_trust(["/" + group.name], sources=["10.98.0.0/16"]))
    path = Path4and6(*other, far.v4, far.v6, "eth0", "02:00:00:66:00:07", far.mac)
    before = seen(host)
    with Wire(far, dev) as arrived:
        run_all(container.spawn(claim_everything, group, path, True))
    after = seen(host).since(before)
    assert set(after.lanes.values()) == {0}
    assert after.refused > 2000
    assert (arrived.lane_dscps, arrived.wrong_ecn, arrived.wrong_checksums) == (0, 0, 0)
    lane = lane_bands()[4]
    assert lane_packets(host, lambda: run_all(host.spawn(send_marked, far.v4, lane, group))) == 1


def test_a_tunnel_of_the_host_does_not_make_a_container_trusted(
    netns_pair: Pair, make_netns: Callable[[], Namespace]
) -> None:
    """VXLAN forgets where a packet came in, and copies its DSCP to the outside when told so."""
    cluster = build(netns_pair, [make_netns(), make_netns()])
    host, far, inner = cluster.host, cluster.far, "10.96.0.2"
    tunnel = ("vxlan", "id", "5", "dstport", "4789", "remote", far.v4, "tos", "inherit")
    host.run("ip", "link", "add", "vx0", "type", *tunnel)
    host.run("ip", "link", "set", "vx0", "addrgenmode", "none", "up")
    host.run("ip", "address", "add", "10.96.0.1/24", "dev", "vx0")
    host.run("ip", "neighbour", "replace", inner, "lladdr", "02:00:00:65:00:01", "dev", "vx0")
    attach(host, make_trust(sources=["0.0.0.0/0"]))
    for lane in lane_bands():
        before = seen(host)
        with Wire(far, "eth0") as arrived:
            run_all(cluster.foreign.spawn(send_marked, inner, lane, None))
        after = seen(host).since(before)
        assert (set(after.lanes.values()), after.refused) == ({0}, 1)
        assert arrived.packets >= 1  # the tunnel's own greetings among them
        assert (arrived.lane_dscps, arrived.wrong_checksums) == (0, 0)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
def test_a_flow_that_loses_its_dscp_arrives_whole(
    netns_pair: Pair, family: socket.AddressFamily
) -> None:
    """TCP shares what it sends with what it may have to send again, and segments are cut later."""
    host, far = netns_pair.a, netns_pair.b
    introduce(netns_pair)
    attach(host, make_trust(uids=[1]))
    sent, got = os.urandom(4_000_000), bytearray()
    address = far.v4 if family == socket.AF_INET else far.v6
    with far.call(socket.create_server, (address, 0), family=family) as server:

        def drain() -> None:
            server.settimeout(20)
            peer, _ = server.accept()
            with peer:
                while data := peer.recv(1 << 16):
                    got.extend(data)

        reader = threading.Thread(target=drain)
        reader.start()
        before = seen(host)
        with Wire(far, "eth0", TCP) as arrived:
            with host.call(socket.socket, family, socket.SOCK_STREAM) as sock:
                wire.mark(sock, lane_bands()[2])
                sock.settimeout(20)
                sock.connect(server.getsockname()[:2])
                sock.sendall(sent)
            reader.join(20)
    assert bytes(got) == sent
    after = seen(host).since(before)
    assert set(after.lanes.values()) == {0}
    assert after.refused > len(sent) // 1500
    assert arrived.packets > 10
    assert (arrived.lane_dscps, arrived.wrong_checksums) == (0, 0)
