"""A link with the classifier and a plain HTB, and what leaves it, for tests on the wire.

The qdisc tree here is written by hand with tc, so that a mistake in tlsched's own tree cannot
hide one of the classifier's.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pyroute2 import IPRoute
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tests.netns import Namespace
from tlsched.bands import MAJOR, Band, all_bands
from tlsched.ebpf import maps, program
from tlsched.ebpf.maps import Counters

EGRESS = "ffff:fff3"
SOL_PACKET, PACKET_AUXDATA, PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC = 263, 8, 1, 1
ETH_P_ALL = 3
TP_STATUS_VLAN_VALID = 0x10
SCHED_CLS = 3
OUR_PRIO = 20


Bands = Mapping[str, Counters]


@dataclass(frozen=True)
class Link:
    """One interface with HTB and a classifier, and what both had counted when it was made."""

    namespace: Namespace
    dev: str
    program_id: int
    counted_before: Bands
    passed_before: Bands

    def counters(self) -> Bands:
        """What the classifier counted on this link, by the name of the band."""
        return _since(self.counted_before, maps.read_counters(self.program_id))

    def classes(self) -> Bands:
        """What HTB's classes sent."""
        return _since(self.passed_before, _read_classes(self.namespace, self.dev))


def make_link(namespace: Namespace, dev: str, classifier: program.Classifier) -> Link:
    """Give an interface HTB and the classifier."""
    add_htb(namespace, dev)
    add_filter(namespace, dev, classifier.fd)
    while True:  # the kernel sends a packet of its own now and then: begin between two of them
        passed = _read_classes(namespace, dev)
        counted = maps.read_counters(classifier.program_id)
        if passed == _read_classes(namespace, dev):
            return Link(namespace, dev, classifier.program_id, counted, passed)


def _since(before: Bands, now: Bands) -> Bands:
    return {
        band: Counters(seen.packets - before[band].packets, seen.bytes - before[band].bytes)
        for band, seen in now.items()
    }


def _read_classes(namespace: Namespace, dev: str) -> Bands:
    def inside() -> dict[int, Counters]:
        with IPRoute() as ip:
            (index,) = ip.link_lookup(ifname=dev)
            return {each["handle"]: _class_counters(each) for each in ip.get_classes(index)}

    seen = namespace.call(inside)
    return {band.name: seen[band.classid] for band in all_bands()}


def _class_counters(message: tcmsg) -> Counters:
    basic = message.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")
    return Counters(basic["packets"], basic["bytes"])


def add_filter(namespace: Namespace, dev: str, program_fd: int, prio: int = OUR_PRIO) -> None:
    """Hang a program at the interface's clsact egress, making clsact where it is missing."""

    def inside() -> None:
        with IPRoute() as ip:
            (index,) = ip.link_lookup(ifname=dev)
            if not [q for q in ip.get_qdiscs(index) if q.get_attr("TCA_KIND") == "clsact"]:
                ip.tc("add", "clsact", index)
            ip.tc(
                "add-filter",
                "bpf",
                index,
                parent=EGRESS,
                handle=1,
                prio=prio,
                protocol=ETH_P_ALL,
                fd=program_fd,
                name="test",
                direct_action=True,
            )

    namespace.call(inside)


def add_htb(namespace: Namespace, dev: str) -> None:
    """One HTB class for each band, none of them short of rate."""
    default = all_bands()[-1].minor
    root = ("root", "handle", f"{MAJOR:x}:", "htb", "default", f"{default:x}")
    namespace.run("tc", "qdisc", "add", "dev", dev, *root)
    for band in all_bands():
        classid = f"{MAJOR:x}:{band.minor:x}"
        where = ("dev", dev, "parent", f"{MAJOR:x}:", "classid", classid)
        rate = ("htb", "rate", "10gbit", "burst", "2mb", "quantum", "60000")
        namespace.run("tc", "class", "add", *where, *rate)


def drained(link: Link, timeout_s: float = 5.0) -> tuple[Bands, Bands]:
    """Classifier's and HTB's counters, as soon as they agree (a queue may still hold packets)."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        counters, classes = link.counters(), link.classes()
        if counters == classes or time.monotonic() > deadline_s:
            return counters, classes
        time.sleep(0.02)


def mark(sock: socket.socket, band: Band) -> None:
    """A lane's marks, as a training process sets them: TOS first, it overwrites the priority."""
    assert band.tos is not None
    assert band.priority is not None
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, band.tos)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, band.tos)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, band.priority)


def packet_socket(namespace: Namespace, dev: str, ethertype: int = 0) -> socket.socket:
    """A raw packet socket on an interface; with ethertype 0 it only sends."""

    def inside() -> socket.socket:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        sock.bind((dev, ethertype))
        return sock

    return namespace.call(inside)


class Listener:
    """What arrives at an interface, VLAN tags included; open it before sending."""

    def __init__(self, namespace: Namespace, dev: str) -> None:
        self.sock = packet_socket(namespace, dev, ETH_P_ALL)
        self.sock.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
        index = namespace.call(socket.if_nametoindex, dev)
        promiscuous = struct.pack("iHH8s", index, PACKET_MR_PROMISC, 0, b"")
        self.sock.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, promiscuous)
        self.sock.settimeout(5.0)

    def frame_with(self, token: bytes) -> bytes:
        """The next frame that holds ``token``; TimeoutError after five seconds of silence."""
        while True:
            frame = self.next_frame()
            if token in frame:
                return frame

    def next_frame(self) -> bytes:
        """The next frame; TimeoutError when there is none for a while."""
        data, ancillary, _, _ = self.sock.recvmsg(70_000, 256)
        for level, kind, value in ancillary:
            if (level, kind) == (SOL_PACKET, PACKET_AUXDATA):
                status, _, _, _, _, tci, tpid = struct.unpack("IIIHHHH", value[:20])
                if status & TP_STATUS_VLAN_VALID:  # the kernel took the outer tag off: put it back
                    return data[:12] + struct.pack("!HH", tpid, tci) + data[12:]
        return data

    def close(self) -> None:
        self.sock.close()


@contextmanager
def vlan_pusher(ethertype: int, tci: int) -> Iterator[int]:
    """Descriptor of a program that gives each packet a tag as an offloading VLAN device would.

    It calls bpf_skb_vlan_push(): the tag stands beside the packet (skb->vlan_tci); one that
    stood there before moves into the frame.
    """
    code = [
        struct.pack("<BBhi", 0xB4, 2, 0, socket.htons(ethertype)),  # r2 = ethertype
        struct.pack("<BBhi", 0xB4, 3, 0, tci),  # r3 = tci
        struct.pack("<BBhi", 0x85, 0, 0, 18),  # call bpf_skb_vlan_push
        struct.pack("<BBhi", 0xB4, 0, 0, -1),  # r0 = TC_ACT_UNSPEC
        struct.pack("<BBhi", 0x95, 0, 0, 0),  # exit
    ]
    load = ctypes.CDLL("libbpf.so.1").bpf_prog_load
    count = ctypes.c_size_t(len(code))
    fd = load(SCHED_CLS, b"vlan_pusher", b"GPL", b"".join(code), count, None)
    assert fd >= 0
    try:
        yield fd
    finally:
        os.close(fd)
