"""The classifier's decision for single packets, asked of the kernel (BPF_PROG_TEST_RUN)."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Packet, fuzz

from tests.ebpf import frames, testrun
from tests.ebpf.frames import IPV4, IPV6, SERVICE_VLAN, VLAN, ethernet, ipv4, ipv6
from tlsched.bands import DEFAULT_BAND, MAJOR, ROOT_HANDLE, Band, all_bands, lane_bands
from tlsched.ebpf import maps, program

pytestmark = pytest.mark.root

TC_ACT_UNSPEC = -1
CLASSIDS = {band.name: band.classid for band in all_bands()}
PRIORITIES = (*range(8), 15, 0x10001, ROOT_HANDLE, CLASSIDS["lane0"], CLASSIDS["default"])
TAGGINGS = ((), (VLAN,), (SERVICE_VLAN,), (SERVICE_VLAN, VLAN), (VLAN, VLAN))


def expected_priority(band: str, priority: int) -> int:
    if band != DEFAULT_BAND or priority >> 16 == MAJOR:
        return CLASSIDS[band]
    return priority


def check(classifier: program.Classifier, frame: bytes, priority: int, band: str) -> None:
    """The verdict lets others decide, and skb->priority is what ``band`` means."""
    result = testrun.run(classifier.fd, frame, priority=priority)
    assert result.verdict == TC_ACT_UNSPEC
    assert result.priority == expected_priority(band, priority), (frame.hex(), priority, band)


def counted(classifier: program.Classifier, before: dict[str, maps.Counters]) -> dict[str, int]:
    after = maps.read_counters(classifier.program_id)
    return {band: after[band].packets - before[band].packets for band in after}


@pytest.mark.stock_kernel
@pytest.mark.parametrize("tags", TAGGINGS)
@pytest.mark.parametrize("lane", lane_bands(), ids=lambda lane: lane.name)
def test_both_marks_lead_into_the_lane(
    classifier: program.Classifier, lane: Band, tags: Sequence[int]
) -> None:
    assert lane.dscp is not None
    assert lane.priority is not None
    for ecn in range(4):
        v4, v6 = ipv4(lane.dscp, ecn=ecn), ipv6(lane.dscp, ecn=ecn)
        check(classifier, ethernet(v4, IPV4, tags), lane.priority, lane.name)
        check(classifier, ethernet(v6, IPV6, tags), lane.priority, lane.name)


@pytest.mark.stock_kernel
def test_every_pair_of_marks(classifier: program.Classifier) -> None:
    for dscp in range(64):
        for priority in PRIORITIES:
            lane = frames.LANES.get((dscp, priority))
            band = lane.name if lane else DEFAULT_BAND
            check(classifier, ethernet(ipv4(dscp), IPV4), priority, band)
            check(classifier, ethernet(ipv6(dscp), IPV6), priority, band)


@pytest.mark.stock_kernel
def test_fragments_and_options_keep_their_band(classifier: program.Classifier) -> None:
    for packet in (
        ipv4(40, options=bytes(4)),
        ipv4(40, options=bytes(40)),
        ipv4(40, fragment=0x2000),
        ipv4(40, fragment=0x00B9),
    ):
        check(classifier, ethernet(packet, IPV4), 6, "lane0")
    fragment = Ether() / IPv6(dst="fd99::2", tc=160) / IPv6ExtHdrFragment(offset=185) / b"12345678"
    check(classifier, bytes(fragment), 6, "lane0")


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (ethernet(ipv4(40), IPV4, (VLAN, VLAN, VLAN)), "three tags"),
        (ethernet(ipv4(40), IPV6, (VLAN,)), "IPv4 announced as IPv6"),
        (ethernet(ipv6(40), IPV4, (VLAN,)), "IPv6 announced as IPv4"),
        (ethernet(b"\x44" + ipv4(40)[1:], IPV4), "IPv4 header of 16 bytes"),
        (ethernet(ipv4(40)[:19], IPV4, (VLAN,)), "IPv4 header cut"),
        (ethernet(ipv6(40)[:39], IPV6, (VLAN,)), "IPv6 header cut"),
        (ethernet(b"\x45\xa0", IPV4, (VLAN,)), "two bytes of IPv4"),
        (ethernet(b"", VLAN), "tag cut"),
        (ethernet(ipv4(40), frames.MPLS), "MPLS"),
        (ethernet(ipv4(40), 0x0064), "802.3 length instead of an ethertype"),
        (bytes(Ether() / ARP()), "ARP"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_ip_packet_is_in_the_default_band(
    classifier: program.Classifier, frame: bytes, why: str
) -> None:
    check(classifier, frame, 6, DEFAULT_BAND)


@pytest.mark.parametrize("minor", [0, 1, 0x10, 0x15, 0x16, 0xFFFF])
def test_a_class_number_is_not_a_mark(classifier: program.Classifier, minor: int) -> None:
    """A privileged SO_PRIORITY may name a class, and HTB would obey (0 even leaves the tree)."""
    for dscp in (0, 40, 8):
        frame = ethernet(ipv4(dscp), IPV4)
        result = testrun.run(classifier.fd, frame, priority=MAJOR << 16 | minor)
        assert result.priority == CLASSIDS[DEFAULT_BAND]


@pytest.mark.parametrize("lane", lane_bands(), ids=lambda lane: lane.name)
def test_a_forwarded_packet_has_no_socket_to_mark_it(
    classifier: program.Classifier, lane: Band
) -> None:
    assert lane.dscp is not None
    assert lane.priority is not None
    frame = ethernet(ipv4(lane.dscp), IPV4)
    result = testrun.run(classifier.fd, frame, priority=lane.priority, ingress_ifindex=1)
    assert (result.verdict, result.priority) == (TC_ACT_UNSPEC, lane.priority)


@pytest.mark.stock_kernel
def test_counters_give_what_the_wire_carries(classifier: program.Classifier) -> None:
    before = maps.read_counters(classifier.program_id)
    frame = ethernet(ipv4(40) + bytes(3000), IPV4)
    testrun.run(classifier.fd, frame, priority=6)
    testrun.run(classifier.fd, frame, priority=6, gso_segs=3, wire_len=len(frame) + 2 * 42)
    testrun.run(classifier.fd, frame, priority=0)
    after = maps.read_counters(classifier.program_id)
    assert list(after) == ["lane0", "lane1", "lane2", "lane3", "lane4", "lane5", "default"]
    assert after["lane0"].packets - before["lane0"].packets == 1 + 3
    assert after["lane0"].bytes - before["lane0"].bytes == 2 * len(frame) + 2 * 42
    assert after["default"].packets - before["default"].packets == 1
    assert after["default"].bytes - before["default"].bytes == len(frame)
    assert all(after[f"lane{n}"] == before[f"lane{n}"] for n in range(1, 6))


def test_twenty_thousand_random_and_damaged_frames(classifier: program.Classifier) -> None:
    rng = random.Random(20)
    expected = dict.fromkeys(maps.BAND_NAMES, 0)
    refused = 0
    before = maps.read_counters(classifier.program_id)
    for _ in range(20_000):
        frame, priority = frames.random_frame(rng), rng.choice(PRIORITIES)
        band = frames.band_for(frame, priority)
        try:
            check(classifier, frame, priority, band)
        except OSError as error:  # some kernels do not let a test run begin with half a header
            if error.errno != errno.EINVAL:
                raise
            refused += 1
        else:
            expected[band] += 1
    assert counted(classifier, before) == expected
    assert min(expected.values()) > 50, "the frames do not reach every band"
    assert refused < 5_000


@settings(max_examples=400, deadline=None)
@given(
    frame=st.builds(
        lambda head, tail: frames.ADDRESSES + head + tail,
        st.sampled_from(
            [bytes.fromhex(text) for text in ("0800", "86dd", "81000001", "88a800018100", "0806")]
        ),
        st.binary(min_size=40, max_size=80),
    ),
    priority=st.one_of(st.sampled_from(PRIORITIES), st.integers(0, 2**32 - 1)),
)
def test_any_bytes(classifier: program.Classifier, frame: bytes, priority: int) -> None:
    check(classifier, frame, priority, frames.band_for(frame, priority))


@pytest.mark.parametrize(
    "layers",
    [
        IP(tos=160) / fuzz(TCP()),
        IP(tos=160) / fuzz(UDP()),
        fuzz(IP()) / fuzz(UDP()),
        Dot1Q(vlan=5) / fuzz(IP()) / fuzz(TCP()),
        Dot1AD(vlan=5) / Dot1Q(vlan=6) / fuzz(IP()) / fuzz(UDP()),
        Dot1Q(vlan=5) / fuzz(IPv6()) / fuzz(TCP()),
        IPv6(tc=160) / fuzz(TCP()),
    ],
    ids=lambda layers: layers.summary().split(" / ")[0],
)
def test_scapy_fuzzed_packets(classifier: program.Classifier, layers: Packet) -> None:
    rng = random.Random(7)
    for _ in range(100):
        frame = bytes(Ether(dst="02:00:00:63:00:02", src="02:00:00:63:00:01") / layers)
        priority = rng.choice(PRIORITIES)
        check(classifier, frame, priority, frames.band_for(frame, priority))
