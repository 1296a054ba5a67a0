"""Real sockets on a real link: the band that each packet takes, and the DSCP that arrives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

from tests.ebpf import wire
from tests.netns import Pair
from tlsched.bands import DEFAULT_BAND, Band, all_bands, lane_bands, priority_set_by_tos
from tlsched.ebpf import program

pytestmark = pytest.mark.root

LANES = pytest.mark.parametrize("lane", lane_bands(), ids=lambda lane: lane.name)
FAMILIES = pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
PORT = 7150
COUNT = 5
TCP_BYTES = 4 << 20


@pytest.fixture(scope="module")
def classifier() -> Iterator[program.Classifier]:
    """The classifier with the default marks, compiled once."""
    with program.load(all_bands()) as loaded:
        yield loaded


@pytest.fixture
def link(netns_pair: Pair, classifier: program.Classifier) -> wire.Link:
    """``netns_pair.a``'s interface with HTB and the classifier."""
    return wire.make_link(netns_pair.a, netns_pair.a.dev, classifier)


def udp_arrivals(pair: Pair, sock: socket.socket, address: str) -> list[Ether]:
    """Send a few datagrams and return their frames as they arrive at the other end."""
    listener = wire.Listener(pair.b, pair.b.dev)
    try:
        for number in range(COUNT):
            sock.sendto(b"token %d of the wire test" % number, (address, PORT))
        tokens = [b"token %d of" % number for number in range(COUNT)]
        return [Ether(listener.frame_with(token)) for token in tokens]
    finally:
        listener.close()


def dscp_of(frame: Ether) -> int:
    tos: int = frame[IP].tos if IP in frame else frame[IPv6].tc
    return tos >> 2


def lane_packets(link: wire.Link) -> dict[str, int]:
    """Packets that HTB saw in each lane's class, once the classifier agrees with it."""
    counters, classes = wire.drained(link)
    assert counters == classes
    return {name: seen.packets for name, seen in classes.items() if name != DEFAULT_BAND}


def udp_socket(pair: Pair, family: socket.AddressFamily) -> tuple[socket.socket, str]:
    sock = pair.a.call(socket.socket, family, socket.SOCK_DGRAM)
    return sock, pair.b.v4 if family == socket.AF_INET else pair.b.v6


@FAMILIES
@LANES
def test_datagrams_of_a_lane(
    netns_pair: Pair, link: wire.Link, lane: Band, family: socket.AddressFamily
) -> None:
    sock, address = udp_socket(netns_pair, family)
    with sock:
        wire.mark(sock, lane)
        arrived = udp_arrivals(netns_pair, sock, address)
    assert [dscp_of(frame) for frame in arrived] == [lane.dscp] * COUNT
    assert lane_packets(link) == {each.name: COUNT if each == lane else 0 for each in lane_bands()}


@pytest.mark.stock_kernel
def test_a_v6_socket_with_a_v4_peer(netns_pair: Pair, link: wire.Link) -> None:
    lane = lane_bands()[1]
    with netns_pair.a.call(socket.socket, socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        wire.mark(sock, lane)
        arrived = udp_arrivals(netns_pair, sock, f"::ffff:{netns_pair.b.v4}")
    assert all(IP in frame and dscp_of(frame) == lane.dscp for frame in arrived)
    assert lane_packets(link)["lane1"] == COUNT


@FAMILIES
@LANES
def test_one_mark_alone_leads_nowhere(
    netns_pair: Pair, link: wire.Link, lane: Band, family: socket.AddressFamily
) -> None:
    """Priority alone, DSCP alone, and another lane's DSCP: arrives unchanged, in no lane."""
    other = lane_bands()[lane.order - 1]
    for dscp, priority in ((0, lane.priority), (lane.dscp, 0), (other.dscp, lane.priority)):
        assert dscp is not None
        sock, address = udp_socket(netns_pair, family)
        with sock:
            wire.mark(sock, Band("odd", 0, priority, dscp))
            arrived = udp_arrivals(netns_pair, sock, address)
        assert [dscp_of(frame) for frame in arrived] == [dscp] * COUNT
    assert set(lane_packets(link).values()) == {0}


@pytest.mark.parametrize("lane", lane_bands(), ids=lambda lane: lane.name)
def test_an_unprivileged_ip_tos_leads_nowhere(
    netns_pair: Pair, link: wire.Link, lane: Band
) -> None:
    """IP_TOS alone sets both DSCP and a priority of the kernel's choice."""
    assert lane.tos is not None
    sock, address = udp_socket(netns_pair, socket.AF_INET)
    with sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, lane.tos)
        assert lane.dscp is not None
        implied = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)
        assert implied == priority_set_by_tos(lane.dscp)
        udp_arrivals(netns_pair, sock, address)
    assert set(lane_packets(link).values()) == {0}


@pytest.mark.stock_kernel
@pytest.mark.lengthy
def test_a_privileged_priority_that_names_a_class(netns_pair: Pair, link: wire.Link) -> None:
    """Without the classifier HTB would take these into lane 0, or past its tree (minor 0)."""
    lane = lane_bands()[0]
    for classid in (lane.classid, lane.classid & 0xFFFF0000):
        sock, address = udp_socket(netns_pair, socket.AF_INET)
        with sock:
            wire.mark(sock, Band("sly", 0, classid, lane.dscp))
            assert len(udp_arrivals(netns_pair, sock, address)) == COUNT
    assert set(lane_packets(link).values()) == {0}
    assert link.counters()[DEFAULT_BAND].packets >= 2 * COUNT


@pytest.mark.stock_kernel
@FAMILIES
@pytest.mark.lengthy
def test_a_tcp_flow_is_counted_as_htb_counts_it(
    netns_pair: Pair, link: wire.Link, family: socket.AddressFamily
) -> None:
    """GSO packets of 64 KiB: both count the segments, each with its headers."""
    lane = lane_bands()[2]
    address = netns_pair.b.v4 if family == socket.AF_INET else netns_pair.b.v6

    def serve() -> socket.socket:
        return socket.create_server((address, PORT), family=family)

    received = []

    def drain(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            received.append(sum(len(data) for data in iter(lambda: peer.recv(1 << 16), b"")))

    with netns_pair.b.call(serve) as server:
        server.settimeout(20)
        reader = threading.Thread(target=drain, args=(server,))
        reader.start()
        with netns_pair.a.call(socket.socket, family, socket.SOCK_STREAM) as sock:
            wire.mark(sock, lane)
            sock.settimeout(20)
            sock.connect((address, PORT))
            sock.sendall(bytes(TCP_BYTES))
        reader.join(20)
    assert received == [TCP_BYTES]
    counters, classes = wire.drained(link)
    assert counters == classes
    segments = counters["lane2"].packets
    assert segments > TCP_BYTES // 1500
    assert counters["lane2"].bytes > TCP_BYTES + segments * 50
    assert {counters[each.name].packets for each in lane_bands() if each.order != 2} == {0}
