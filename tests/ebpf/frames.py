"""Ethernet frames for the classifier, and what RFCs and the marks say about each.

The reading below is written from the RFCs (791, 8200) and IEEE 802.1Q, not from the classifier.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

from tlsched.bands import DEFAULT_BAND, lane_bands

IPV4, IPV6, VLAN, SERVICE_VLAN, ARP, MPLS = 0x0800, 0x86DD, 0x8100, 0x88A8, 0x0806, 0x8847
ADDRESSES = bytes.fromhex("020000630002 020000630001")
LANES = {(band.dscp, band.priority): band for band in lane_bands()}


def ipv4(
    dscp: int,
    *,
    ecn: int = 0,
    options: bytes = b"",
    fragment: int = 0,
    source: bytes = b"\x0a\x63\x00\x01",
) -> bytes:
    """An IPv4 packet of UDP's protocol; ``fragment`` is the flags-and-offset field."""
    words = 5 + len(options) // 4
    total = words * 4 + 8
    head = struct.pack(
        "!BBHHHBBH4s4s",
        *(0x40 | words, dscp << 2 | ecn, total, 7, fragment, 64, 17, 0),
        *(source, b"\x0a\x63\x00\x02"),
    )
    return head + options + bytes(8)


def ipv6(
    dscp: int,
    *,
    ecn: int = 0,
    next_header: int = 17,
    flow: int = 0x12345,
    source: bytes = bytes(16),
) -> bytes:
    """An IPv6 packet whose payload is eight zero bytes."""
    first = 6 << 28 | dscp << 22 | ecn << 20 | flow
    return struct.pack("!IHBB", first, 8, next_header, 64) + source + bytes(16) + bytes(8)


def ethernet(packet: bytes, ethertype: int, tags: Sequence[int] = ()) -> bytes:
    """A frame with one VLAN tag (TCI 0x4567, which looks like IPv4) for each ethertype in tags."""
    frame = ADDRESSES
    for tag in tags:
        frame += struct.pack("!HH", tag, 0x4567)
    return frame + struct.pack("!H", ethertype) + packet


def dscp_in(frame: bytes) -> int | None:
    """The DSCP of the IP packet that a frame carries behind at most two tags, if it has one."""
    found = packet_in(frame)
    return None if found is None else found[1]


def packet_in(frame: bytes) -> tuple[int, int] | None:
    """Where in a frame the IP packet of :func:`dscp_in` begins, and its DSCP."""
    position, tags = 12, 0
    while True:
        if len(frame) < position + 2:
            return None
        (ethertype,) = struct.unpack_from("!H", frame, position)
        position += 2
        if ethertype not in (VLAN, SERVICE_VLAN):
            break
        tags += 1
        position += 2
    packet = frame[position:]
    if tags > 2:
        return None
    if ethertype == IPV4 and len(packet) >= 20 and 0x45 <= packet[0] <= 0x4F:
        return position, packet[1] >> 2
    if ethertype == IPV6 and len(packet) >= 40 and packet[0] >> 4 == 6:
        return position, (int.from_bytes(packet[:2], "big") >> 6) & 63
    return None


def band_for(frame: bytes, priority: int) -> str:
    """Name of the band that the marks give this frame of a local socket."""
    lane = LANES.get((dscp_in(frame), priority))
    return lane.name if lane else DEFAULT_BAND


def random_frame(rng: random.Random) -> bytes:
    """Noise, or a frame that was right before something happened to it."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randint(14, 120))
    dscp = rng.choice([*(dscp or 0 for dscp, _ in LANES), rng.randrange(64)])
    tags = rng.choices((VLAN, SERVICE_VLAN), k=rng.choice((0, 0, 0, 1, 1, 2, 2, 3, 4)))
    if rng.random() < 0.5:
        options = bytes(4 * rng.choice((0, 0, 1, 10)))
        packet = ipv4(dscp, ecn=rng.randrange(4), options=options, fragment=rng.randrange(1 << 16))
        ethertype = IPV4
    else:
        packet = ipv6(dscp, ecn=rng.randrange(4), next_header=rng.randrange(256))
        ethertype = IPV6
    if rng.random() < 0.1:
        ethertype = rng.choice((IPV4, IPV6, ARP, MPLS, 0x88CC, rng.randrange(1 << 16)))
    frame = bytearray(ethernet(packet, ethertype, tags))
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    if rng.random() < 0.3:
        del frame[rng.randint(14, len(frame)) :]
    return bytes(frame)
