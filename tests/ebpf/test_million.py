"""A million random and malformed packets, against a reading of the rules written apart.

Most begin as something a network carries, made here or by scapy, and are then damaged.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_network

import numpy as np
import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Raw, fuzz

from tests.ebpf import frames, testrun
from tests.ebpf.frames import IPV4, IPV6, SERVICE_VLAN, VLAN, ethernet, ipv4, ipv6
from tlsched.bands import DEFAULT_BAND, MAJOR, all_bands, lane_bands
from tlsched.ebpf import maps, program, trustmaps
from tlsched.trust import ANY_LOCAL, Trust, make_trust

pytestmark = pytest.mark.root

PACKETS = 1_000_000
BATCH = 50_000
ROOM = 160
SEED = int(os.environ.get("TLSCHED_TEST_SEED", random.SystemRandom().randrange(2**32)))
CLASSIDS = {band.name: band.classid for band in all_bands()}
LANE_DSCPS = {dscp for dscp, _ in frames.LANES}
PRIORITIES = np.array([*range(8), 15, 0x10001, MAJOR << 16, *CLASSIDS.values(), 2**32 - 1])
UNSPEC = -1

SOURCES = ("10.99.0.0/24", "10.128.0.0/9", "192.0.2.7/32", "fd00::/8", "2001:db8::1/128")
# Inside and just outside of them.
ADDRESSES4 = ("0a630001", "0a630101", "0a62ffff", "0a800000", "0a7fffff", "c0000207", "c0000206")
ADDRESSES6 = (
    *("00" * 16, "fd" + "00" * 15, "fc" + "ff" * 15, "fe" + "00" * 15),
    *("20010db8" + "00" * 11 + "01", "20010db8" + "00" * 11 + "02", "00" * 10 + "ffff0a630001"),
)


@dataclass(frozen=True)
class Case:
    """A trust, and whether it takes in the socket that a test run has: root's, in our cgroup."""

    trust: Trust
    local: bool


CASES = (
    Case(ANY_LOCAL, local=True),
    Case(make_trust(sources=SOURCES), local=True),
    Case(make_trust(uids=[0, 5], sources=SOURCES[:2]), local=True),
    Case(make_trust(uids=[1, 5], sources=SOURCES), local=False),
    Case(make_trust(cgroups=["/"], sources=SOURCES[2:]), local=True),
)


def shapes(rng: random.Random) -> Iterator[bytes]:
    """What a network carries, whole."""
    tags = ((), (), (VLAN,), (SERVICE_VLAN, VLAN), (VLAN, VLAN, VLAN))
    for dscp in (*range(64), *(dscp or 0 for dscp in [*LANE_DSCPS] * 20)):
        for tagging in tags:
            four = bytes.fromhex(rng.choice(ADDRESSES4))
            six = bytes.fromhex(rng.choice(ADDRESSES6))
            options = bytes(4 * rng.choice((0, 0, 1, 10)))
            ecn, fragment = rng.randrange(4), rng.choice((0, 0x2000, 0x00B9, 0x4000))
            packet = ipv4(dscp, ecn=ecn, options=options, fragment=fragment, source=four)
            yield ethernet(packet, IPV4, tagging)
            yield ethernet(ipv6(dscp, ecn=ecn, source=six), IPV6, tagging)
    random.seed(rng.randrange(2**32))  # scapy's fuzz() draws from the module
    for layers in (
        *(IP(tos=160) / fuzz(TCP()), fuzz(IP()) / fuzz(UDP()), fuzz(IP()) / fuzz(ICMP())),
        *(Dot1Q(vlan=5) / fuzz(IP()) / fuzz(TCP()), Dot1AD() / Dot1Q() / fuzz(IP()) / fuzz(UDP())),
        *(fuzz(IPv6()) / fuzz(TCP()), IPv6(tc=160) / IPv6ExtHdrHopByHop() / UDP()),
        *(IPv6(tc=96) / IPv6ExtHdrFragment(offset=185) / Raw(b"12345678"), ARP(), fuzz(Dot1Q())),
    ):
        for _ in range(100):
            yield bytes(Ether(dst="02:00:00:63:00:02", src="02:00:00:63:00:01") / layers)


def damaged(pool: list[bytes], rng: np.random.Generator) -> Iterator[tuple[bytes, int, int]]:
    """Frames of the pool, some cut or with bytes changed, each with a priority and a way in."""
    rows = np.zeros((len(pool), ROOM), np.uint8)
    for row, frame in zip(rows, pool, strict=True):
        row[: len(frame[:ROOM])] = np.frombuffer(frame[:ROOM], np.uint8)
    sizes = np.array([min(len(frame), ROOM) for frame in pool])
    for _ in range(PACKETS // BATCH):
        chosen = rng.integers(len(pool), size=BATCH)
        batch, lengths = rows[chosen], sizes[chosen]
        for _ in range(2):  # a byte of the headers
            hit = np.flatnonzero(rng.random(BATCH) < 0.2)
            batch[hit, rng.integers(12, 60, hit.size)] = rng.integers(256, size=hit.size)
        noise = np.flatnonzero(rng.random(BATCH) < 0.02)
        batch[noise] = rng.integers(256, size=(noise.size, ROOM))
        cut = rng.random(BATCH) < 0.1
        lengths = np.where(cut, rng.integers(14, lengths + 1), lengths)
        priorities = rng.choice(PRIORITIES, BATCH).tolist()
        ways_in = (rng.random(BATCH) < 0.3).astype(int).tolist()
        text = batch.tobytes()
        for number, length in enumerate(lengths.tolist()):
            start = number * ROOM
            yield text[start : start + length], priorities[number], ways_in[number]


class Oracle:
    """What the rules say of a packet, and whether what came of it is that."""

    def __init__(self, case: Case) -> None:
        self._local = case.local
        networks = [ip_network(source) for source in case.trust.sources]
        self._prefixes = {
            version: [
                (
                    int(each.network_address) >> each.max_prefixlen - each.prefixlen,
                    each.max_prefixlen - each.prefixlen,
                )
                for each in networks
                if each.version == version
            ]
            for version in (4, 6)
        }

    def judge(self, frame: bytes, priority: int, way_in: int) -> tuple[str, int | None]:
        """The band, and where in the frame an IP header loses its DSCP (None: nowhere)."""
        found = frames.packet_in(frame)
        if found is None or found[1] not in LANE_DSCPS:
            return DEFAULT_BAND, None
        start, dscp = found
        if way_in:
            if self._is_trusted_source(frame, start):
                return BY_DSCP[dscp], None
            return DEFAULT_BAND, start
        lane = frames.LANES.get((dscp, priority))
        if not self._local:
            return DEFAULT_BAND, start
        return (lane.name if lane else DEFAULT_BAND), None

    def _is_trusted_source(self, frame: bytes, start: int) -> bool:
        version = frame[start] >> 4
        place = slice(start + 12, start + 16) if version == 4 else slice(start + 8, start + 24)
        address = int.from_bytes(frame[place], "big")
        return any(address >> bits == prefix for prefix, bits in self._prefixes[version])


BY_DSCP = {band.dscp: band.name for band in lane_bands()}


def is_cleared(before: bytes, after: bytes, start: int) -> bool:
    """Whether only the DSCP is gone, and the IPv4 checksum is as right (or wrong) as it was."""
    if before[start] >> 4 == 6:
        word = int.from_bytes(before[start : start + 2], "big") & 0xF03F
        return after == before[:start] + word.to_bytes(2, "big") + before[start + 2 :]
    own, last = start + 10, start + 20
    expected = bytearray(before)
    expected[start + 1] &= 3
    expected[own : own + 2] = after[own : own + 2]
    same_sum = words(before[start:last]) % 0xFFFF == words(after[start:last]) % 0xFFFF
    return after == expected and same_sum


def words(header: bytes) -> int:
    return sum(int.from_bytes(header[i : i + 2], "big") for i in range(0, len(header), 2))


@pytest.fixture
def apart() -> Iterator[program.Classifier]:
    """A classifier of this test's own, since its trust changes."""
    with program.load(all_bands()) as loaded:
        yield loaded


def test_a_million_packets(apart: program.Classifier) -> None:
    print(f"TLSCHED_TEST_SEED={SEED}")  # noqa: T201  # shown by pytest when it fails
    pool = [frame[:ROOM] for frame in shapes(random.Random(SEED))]
    run = testrun.Runner(apart.fd)
    expected, refused, kernel_refused = Counter[str](), 0, 0
    oracle = Oracle(CASES[0])
    per_case = PACKETS // len(CASES)
    before = maps.read_counters(apart.program_id)
    packets = damaged(pool, np.random.default_rng(SEED))
    for number, (frame, priority, way_in) in enumerate(packets):
        if number % per_case == 0:
            case = CASES[number // per_case]
            trustmaps.change(apart.program_id, trustmaps.resolve(case.trust))
            oracle = Oracle(case)
        if code := run(frame, priority, way_in):
            assert code == errno.EINVAL  # some kernels want a whole header of what it says to be
            kernel_refused += 1
            continue
        band, cleared = oracle.judge(frame, priority, way_in)
        what = (SEED, number, frame.hex(), priority, way_in, band)
        own = band != DEFAULT_BAND or priority >> 16 == MAJOR
        assert run.priority == (CLASSIDS[band] if own else priority), what
        assert run.verdict == UNSPEC, what
        if cleared is None:
            assert run.frame == frame, what
        else:
            assert is_cleared(frame, run.frame, cleared), what
            refused += 1
        expected[band] += 1
    after = maps.read_counters(apart.program_id)
    assert {name: after[name].packets - before[name].packets for name in after} == expected
    assert maps.read_refused(apart.program_id).packets == refused
    assert min(expected.values()) > PACKETS // 1000, SEED
    assert refused > PACKETS // 50
    assert sum(expected.values()) + kernel_refused == PACKETS
    assert kernel_refused < PACKETS // 5
