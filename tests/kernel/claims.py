"""Every way to claim a lane: each socket kind, each priority, each DSCP, as a neighbour would.

Run as a function of a child process, inside a namespace and a cgroup.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.ebpf.frames import IPV4, IPV6, VLAN
from tlsched.bands import ROOT_HANDLE, all_bands

PORT = 7150
ECN = 1  # ECT(1), RFC 3168: goes with every claim, and is not to be lost
IP_MTU_DISCOVER, IP_PMTUDISC_DONT = 10, 0  # <linux/in.h>
IPV6_MTU_DISCOVER, IPV6_HDRINCL = 23, 36  # <linux/in6.h>
PRIORITIES = (*range(8), ROOT_HANDLE, all_bands()[0].classid)
MARKS = tuple((dscp, priority) for dscp in range(64) for priority in PRIORITIES)
FRAGMENTED = 3000  # bytes of payload: three fragments at an MTU of 1500
UNUSED_ETHERTYPE = 0x88B5  # local experimental (IEEE 802)

Claim = Callable[[int, int], None]  # of a DSCP and a priority


@dataclass(frozen=True)
class Path4and6:
    """From where to where: addresses, and for frames made by hand the interface and next hop."""

    source4: str
    source6: str
    target4: str
    target6: str
    dev: str
    mac: str
    next_mac: str


def claim_everything(cgroup: Path | None, path: Path4and6, on_wire: bool) -> None:
    """All marks by all ways; ``on_wire`` also by frames that only the next host understands.

    The process moves into ``cgroup`` first, since a socket belongs where it was made.
    """
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    with ExitStack() as stack:
        ways = [*_datagrams(stack, path), *_raw(stack, path), *_frames(stack, path, on_wire)]
        for number, (dscp, priority) in enumerate(MARKS):
            for claim in ways:
                claim(dscp, priority)
            if number % 32 == 0:
                time.sleep(0.005)  # leave the listener its turn


def _datagrams(stack: ExitStack, path: Path4and6) -> Iterator[Claim]:
    four, mapped, six = (
        (socket.AF_INET, path.target4),
        (socket.AF_INET6, "::ffff:" + path.target4),
        (socket.AF_INET6, path.target6),
    )
    for family, target in (four, mapped, six):
        sock = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT)
        level, option = _class_option(family if target != mapped[1] else socket.AF_INET)
        yield from _datagram_claims(sock, (target, PORT), level, option)


def _class_option(family: int) -> tuple[int, int]:
    if family == socket.AF_INET:
        return socket.IPPROTO_IP, socket.IP_TOS
    return socket.IPPROTO_IPV6, socket.IPV6_TCLASS


def _datagram_claims(
    sock: socket.socket, to: tuple[str, int], level: int, option: int
) -> Iterator[Claim]:
    def set_both(dscp: int, priority: int) -> None:
        sock.setsockopt(level, option, dscp << 2 | ECN)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)

    def options(dscp: int, priority: int) -> None:
        set_both(dscp, priority)
        sock.sendto(b"by option", to)

    def fragments(dscp: int, priority: int) -> None:
        set_both(dscp, priority)
        sock.sendto(bytes(FRAGMENTED), to)

    def class_beside(dscp: int, priority: int) -> None:
        set_both(0, priority)
        sock.sendmsg([b"by message"], [(level, option, _number(dscp << 2 | ECN))], 0, to)

    def both_beside(dscp: int, priority: int) -> None:
        set_both(0, 0)
        marks = [
            (level, option, _number(dscp << 2 | ECN)),
            (socket.SOL_SOCKET, socket.SO_PRIORITY, _number(priority)),
        ]
        sock.sendmsg([b"by two messages"], marks, 0, to)

    yield from (options, fragments, class_beside)
    if has_priority_message():
        yield both_beside


def has_priority_message() -> bool:
    """Whether the kernel takes a priority beside a message (Linux 6.14)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        beside = [(socket.SOL_SOCKET, socket.SO_PRIORITY, _number(1))]
        try:
            sock.sendmsg([b""], beside, 0, ("127.0.0.1", PORT))
        except OSError:
            return False
        return True


def _number(value: int) -> bytes:
    return struct.pack("=I", value)


def _raw(stack: ExitStack, path: Path4and6) -> Iterator[Claim]:
    raw4 = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW))
    raw6 = stack.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW))
    raw6.setsockopt(socket.IPPROTO_IPV6, IPV6_HDRINCL, 1)

    def header_by_hand(dscp: int, priority: int) -> None:
        raw4.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        for fragment in (0, 0x2000, 0x0003):  # whole, first of several, last of several
            raw4.sendto(ipv4(path, dscp, fragment), (path.target4, 0))

    def header_by_hand6(dscp: int, priority: int) -> None:
        raw6.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        raw6.sendto(ipv6(path, dscp), (path.target6, 0))

    yield from (header_by_hand, header_by_hand6)


def _frames(stack: ExitStack, path: Path4and6, on_wire: bool) -> Iterator[Claim]:
    raw = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
    cooked = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0))
    packets = ((IPV4, ipv4), (IPV6, ipv6))
    # What the socket says of a frame need not be what the frame says of itself.
    announced = (0, IPV4, IPV6, UNUSED_ETHERTYPE) if on_wire else (0,)
    tags = (b"", struct.pack("!HH", VLAN, 7), struct.pack("!HHHH", VLAN, 0x4500, VLAN, 7))
    hop = bytes.fromhex(path.next_mac.replace(":", ""))
    start = hop + bytes.fromhex(path.mac.replace(":", ""))

    def frames(dscp: int, priority: int) -> None:
        for sock in (raw, cooked):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        for ethertype, packet in packets:
            body = packet(path, dscp)
            cooked.sendto(body, (path.dev, ethertype, 0, 0, hop))
            for protocol in announced:
                for tag in tags if on_wire else tags[:1]:
                    frame = start + tag + struct.pack("!H", ethertype) + body
                    raw.sendto(frame, (path.dev, protocol))

    yield frames


def ipv4(path: Path4and6, dscp: int, fragment: int = 0) -> bytes:
    """An IPv4 packet of UDP's protocol with a right checksum."""
    addresses = socket.inet_aton(path.source4) + socket.inet_aton(path.target4)
    head = struct.pack("!BBHHHBBH", 0x45, dscp << 2 | ECN, 36, 7, fragment, 64, 17, 0) + addresses
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + _udp(16)


def ipv6(path: Path4and6, dscp: int) -> bytes:
    """An IPv6 packet of UDP's protocol."""
    addresses = (socket.inet_pton(socket.AF_INET6, each) for each in (path.source6, path.target6))
    first = 6 << 28 | (dscp << 2 | ECN) << 20 | 0x12345
    return struct.pack("!IHBB", first, 16, 17, 64) + b"".join(addresses) + _udp(16)


def _udp(length: int) -> bytes:
    return struct.pack("!HHHH", PORT, PORT, length, 0) + b"by hand!"


def checksum(header: bytes) -> int:
    """The internet checksum (RFC 1071); 0 over a header that holds its own, right one."""
    total: int = sum(struct.unpack(f"!{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF - total
