"""Frames that sockets do not make by themselves: VLAN tags, no Ethernet, forwarded, damaged."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether
from scapy.packet import Packet

from tests.ebpf import frames, wire
from tests.ebpf.frames import IPV4, IPV6, SERVICE_VLAN, VLAN
from tests.kernel.claims import checksum
from tests.netns import Namespace, Pair
from tlsched.bands import DEFAULT_BAND, all_bands, lane_bands
from tlsched.ebpf import program, trustmaps
from tlsched.tc.kernel import Kernel, interface_index
from tlsched.trust import make_trust

pytestmark = pytest.mark.root

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def has_ethernet_header(dev: str) -> bool:
    with Kernel() as kernel:
        return kernel.device(interface_index(dev)).has_ethernet_header


TAGGINGS = pytest.mark.parametrize(
    "tags",
    [(), (VLAN,), (SERVICE_VLAN,), (SERVICE_VLAN, VLAN), (VLAN, VLAN)],
    ids=["untagged", "802.1Q", "802.1ad", "802.1ad+Q", "802.1Q+Q"],
)
PACKETS = pytest.mark.parametrize(
    ("packet", "ethertype"),
    [(frames.ipv4(32), IPV4), (frames.ipv6(32), IPV6)],
    ids=["v4", "v6"],
)
LANE = lane_bands()[1]  # DSCP 32, priority 5
TOKEN = b"the token"


@pytest.fixture(scope="module")
def classifier() -> Iterator[program.Classifier]:
    """The classifier with the default marks, compiled once."""
    with program.load(all_bands()) as loaded:
        yield loaded


@pytest.fixture
def link(netns_pair: Pair, classifier: program.Classifier) -> wire.Link:
    """``netns_pair.a``'s interface with HTB and the classifier."""
    return wire.make_link(netns_pair.a, netns_pair.a.dev, classifier)


def arrival(pair: Pair, sock: socket.socket, frame: bytes) -> Ether:
    """Send one frame through a packet socket and return it as it arrives."""
    listener = wire.Listener(pair.b, pair.b.dev)
    try:
        sock.send(frame)
        return Ether(listener.frame_with(TOKEN))
    finally:
        listener.close()


def lane_packets(link: wire.Link) -> int:
    """Packets in LANE's class; the classifier and HTB have to agree on every band."""
    counters, classes = wire.drained(link)
    assert counters == classes
    others = {each.name for each in lane_bands() if each != LANE}
    assert {classes[name].packets for name in others} == {0}
    return classes[LANE.name].packets


def tags_of(frame: Ether) -> list[int]:
    """Ethertypes of a frame's VLAN tags, outermost first."""
    found: list[int] = []
    layer: Packet = frame
    while isinstance(layer.payload, (Dot1Q, Dot1AD)):
        found.append(int(layer.type))
        layer = layer.payload
    return found


@pytest.mark.parametrize("announced", [0, wire.ETH_P_ALL], ids=["unnamed", "all"])
@TAGGINGS
@PACKETS
def test_tags_inside_the_frame(
    netns_pair: Pair,
    link: wire.Link,
    packet: bytes,
    ethertype: int,
    tags: Sequence[int],
    announced: int,
) -> None:
    frame = frames.ethernet(packet + TOKEN, ethertype, tags)
    with wire.packet_socket(netns_pair.a, netns_pair.a.dev, announced) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 5)
        arrived = arrival(netns_pair, sock, frame)
        assert lane_packets(link) == 1
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 6)
        arrival(netns_pair, sock, frame)
        assert lane_packets(link) == 1
    assert tags_of(arrived) == list(tags)
    tos = arrived[IP].tos if ethertype == IPV4 else arrived[IPv6].tc
    assert tos >> 2 == LANE.dscp


@pytest.mark.stock_kernel
@pytest.mark.parametrize(
    "tags",
    [(VLAN,), (SERVICE_VLAN,), (VLAN, SERVICE_VLAN), (VLAN, VLAN)],
    ids=["802.1Q", "802.1ad", "802.1Q in 802.1ad", "802.1Q in 802.1Q"],
)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
@pytest.mark.lengthy
def test_tags_beside_the_packet(
    netns_pair: Pair, link: wire.Link, family: socket.AddressFamily, tags: Sequence[int]
) -> None:
    """As a VLAN device leaves them: the last one in skb->vlan_tci, any other in the frame."""
    a, b = netns_pair.a, netns_pair.b
    for address, mac in ((b.v4, b.mac), (b.v6, b.mac)):  # tagged answers would not be understood
        a.run("ip", "neighbour", "replace", address, "lladdr", mac, "dev", a.dev)
    with ExitStack() as stack:
        for prio, tag in enumerate(tags, start=1):
            pusher = stack.enter_context(wire.vlan_pusher(tag, 0x4567))
            wire.add_filter(a, a.dev, pusher, prio)
        listener = wire.Listener(b, b.dev)
        stack.callback(listener.close)
        sock = stack.enter_context(a.call(socket.socket, family, socket.SOCK_DGRAM))
        wire.mark(sock, LANE)
        sock.sendto(TOKEN, (b.v4 if family == socket.AF_INET else b.v6, 7150))
        arrived = Ether(listener.frame_with(TOKEN))
    assert tags_of(arrived) == list(reversed(tags))
    assert lane_packets(link) == 1


@pytest.mark.parametrize("tags", [(), (VLAN,)], ids=["untagged", "tagged"])
@pytest.mark.parametrize("kept", [1, 2, 19])
def test_a_cut_header_is_no_ip_packet(
    netns_pair: Pair, link: wire.Link, tags: Sequence[int], kept: int
) -> None:
    frame = frames.ethernet(frames.ipv4(32)[:kept], IPV4, tags)
    with wire.packet_socket(netns_pair.a, netns_pair.a.dev) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 5)
        before = link.counters()[DEFAULT_BAND].packets
        sock.send(frame)
    assert lane_packets(link) == 0
    assert link.counters()[DEFAULT_BAND].packets >= before + 1


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
def test_a_device_without_ethernet_header(netns_pair: Pair, family: socket.AddressFamily) -> None:
    namespace: Namespace = netns_pair.a

    def open_tun() -> int:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
        return fd

    tun = namespace.call(open_tun)
    try:
        headers = [namespace.call(has_ethernet_header, dev) for dev in ("eth0", "lo", "tun0")]
        assert headers == [True, True, False]
        namespace.run("ip", "link", "set", "tun0", "addrgenmode", "none", "up")
        namespace.run("ip", "address", "add", "10.98.0.1/24", "dev", "tun0")
        namespace.run("ip", "address", "add", "fd98::1/64", "dev", "tun0", "nodad")
        with (
            program.load(all_bands(), ethernet=False) as bare,
            namespace.call(socket.socket, family, socket.SOCK_DGRAM) as sock,
        ):
            link = wire.make_link(namespace, "tun0", bare)
            wire.mark(sock, LANE)
            to = ("10.98.0.2" if family == socket.AF_INET else "fd98::2", 7150)
            sock.sendto(TOKEN, to)
            assert lane_packets(link) == 1
            trustmaps.change(bare.program_id, trustmaps.resolve(make_trust(uids=[1])))
            sock.sendto(TOKEN, to)
            assert lane_packets(link) == 1
        # The kernel's own router solicitation may come first; with no packet left, read() raises.
        packets = (found for found in iter(lambda: os.read(tun, 2000), b"") if TOKEN in found)
        for dscp in (LANE.dscp, 0):
            packet = next(packets)
            parsed = IP(packet) if family == socket.AF_INET else IPv6(packet)
            assert (parsed.tos if IP in parsed else parsed.tc) == (dscp or 0) << 2
            assert IP not in parsed or checksum(packet[:20]) == 0
    finally:
        os.close(tun)


def test_forwarded_packets_stay_out(netns_pair: Pair, classifier: program.Classifier) -> None:
    """ip_forward() makes a priority of the TOS byte, which for AF11 would be lane 4's."""
    a, router = netns_pair.a, netns_pair.b
    router.run("ip", "link", "add", "out", "type", "veth", "peer", "name", "sink")
    for dev in ("out", "sink"):
        router.run("ip", "link", "set", dev, "addrgenmode", "none", "up")
    router.run("ip", "address", "add", "198.51.100.1/24", "dev", "out")
    neighbour = ("198.51.100.2", "lladdr", "02:00:00:63:00:09", "dev", "out")
    router.run("ip", "neighbour", "add", *neighbour)
    router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    a.run("ip", "route", "add", "198.51.100.0/24", "via", router.v4)
    link = wire.make_link(router, "out", classifier)
    listener = wire.Listener(router, "sink")
    try:
        for lane in lane_bands():
            with a.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as sock:
                wire.mark(sock, lane)
                token = b"forwarded as " + lane.name.encode()
                sock.sendto(token, ("198.51.100.2", 7150))
                arrived = Ether(listener.frame_with(token))
                assert arrived[IP].tos >> 2 == 0
    finally:
        listener.close()
    counters, classes = wire.drained(link)
    assert counters == classes
    assert {counters[lane.name].packets for lane in lane_bands()} == {0}
    assert counters[DEFAULT_BAND].packets >= len(lane_bands())


def test_a_filter_after_ours_still_sees_the_packets(netns_pair: Pair, link: wire.Link) -> None:
    """TC_ACT_UNSPEC: another program's tag is put on although ours came first."""
    a, b = netns_pair.a, netns_pair.b
    a.run("ip", "neighbour", "replace", b.v4, "lladdr", b.mac, "dev", a.dev)
    listener = wire.Listener(b, b.dev)
    try:
        with wire.vlan_pusher(VLAN, 0x0064) as pusher:
            wire.add_filter(a, a.dev, pusher, wire.OUR_PRIO + 1)
        with a.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as sock:
            wire.mark(sock, LANE)
            sock.sendto(TOKEN, (b.v4, 7150))
            arrived = Ether(listener.frame_with(TOKEN))
    finally:
        listener.close()
    assert tags_of(arrived) == [VLAN]
    assert lane_packets(link) == 1
