"""A host, a link, containers behind it; what its lanes counted, and what arrived at the far end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from tests.ebpf import wire
from tests.kernel.claims import ECN, Path4and6, checksum
from tests.netns import End, Namespace, Pair
from tlsched import control
from tlsched.bands import DEFAULT_BAND, lane_bands
from tlsched.config import LinkSettings
from tlsched.tc.kernel import Kernel
from tlsched.tc.observed import Observed
from tlsched.trust import Trust

LANE_DSCPS = {band.dscp for band in lane_bands()}
LIMIT_S = 60.0
SO_RCVBUFFORCE = 33  # <asm-generic/socket.h>
TCP, UDP, FRAGMENT = 6, 17, 44  # IANA protocol numbers


@dataclass
class Wire:
    """Reads what arrives at the far end of a link: datagrams, and what is wrong with them."""

    namespace: Namespace
    dev: str
    protocol: int = UDP
    packets: int = 0
    wrong_checksums: int = 0
    wrong_ecn: int = 0
    lane_dscps: int = 0

    def __enter__(self) -> Wire:
        self._listener = wire.Listener(self.namespace, self.dev)
        sock = self._listener.sock
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
        sock.settimeout(0.3)
        self._stop = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._reader.join()
        self._listener.close()

    def _read(self) -> None:
        while True:
            try:
                self._look_at(self._listener.next_frame())
            except TimeoutError:
                if self._stop:
                    return

    def _look_at(self, frame: bytes) -> None:
        start = 14
        while frame[start - 2 : start] == b"\x81\x00":
            start += 4
        packet = frame[start:]
        four = packet[0] >> 4 == 4
        if packet[9 if four else 6] not in (self.protocol, FRAGMENT):
            return
        tos = int.from_bytes(packet[:2], "big") & 0xFF if four else packet[0] << 4 | packet[1] >> 4
        self.packets += 1
        self.lane_dscps += (tos & 0xFF) >> 2 in LANE_DSCPS
        self.wrong_ecn += tos & 3 != ECN
        self.wrong_checksums += four and checksum(packet[:20]) != 0


@dataclass(frozen=True)
class Cluster:
    """A host with a link to another, and two containers behind it, whose packets it forwards."""

    host: End
    far: End
    trusted: Namespace
    foreign: Namespace

    def path(self, where: Namespace) -> Path4and6:
        if where == self.host:
            return _path(self.host.v4, self.host.v6, self.far, self.host.mac, self.far.mac)
        number = 1 if where == self.trusted else 2
        own, gateway = f"02:00:00:64:0{number}:02", f"02:00:00:64:0{number}:01"
        return _path(f"10.78.{number}.2", f"fd78:{number}::2", self.far, own, gateway)


def _path(v4: str, v6: str, far: End, mac: str, next_mac: str) -> Path4and6:
    return Path4and6(v4, v6, far.v4, far.v6, "eth0", mac, next_mac)


def introduce(pair: Pair) -> None:
    """Tell both ends the other's hardware address, so that no packet has to wait for it."""
    for here, there in ((pair.a, pair.b), (pair.b, pair.a)):
        for address in (there.v4, there.v6):
            add = ("replace", address, "lladdr", there.mac, "dev", "eth0")
            here.run("ip", "neighbour", *add)


def build(pair: Pair, containers: Sequence[Namespace]) -> Cluster:
    """Join two empty namespaces to the pair's first end as containers; it forwards for them."""
    host, far = pair.a, pair.b
    introduce(pair)
    host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
    for number, container in enumerate(containers, start=1):
        inside, outside = f"02:00:00:64:0{number}:02", f"02:00:00:64:0{number}:01"
        veth = ("type", "veth", "peer", "name", "eth0", "address", inside, "netns", container.name)
        host.run("ip", "link", "add", f"c{number}", "address", outside, *veth)
        for where, dev, last in ((host, f"c{number}", 1), (container, "eth0", 2)):
            where.run("ip", "link", "set", dev, "addrgenmode", "none", "up")
            for prefix in (f"10.78.{number}.{last}/24", f"fd78:{number}::{last}/64"):
                dad = ("nodad",) if ":" in prefix else ()
                where.run("ip", "address", "add", prefix, "dev", dev, *dad)
        for gateway in (f"10.78.{number}.1", f"fd78:{number}::1"):
            container.run("ip", "neighbour", "replace", gateway, "lladdr", outside, "dev", "eth0")
            container.run("ip", "route", "add", "default", "via", gateway)
    return Cluster(host, far, *containers)


@dataclass(frozen=True)
class Seen:
    """Packets of each lane and of those refused since the attach: classifier's, then HTB's."""

    lanes: dict[str, int]
    classes: dict[str, int]
    refused: int
    program_id: int

    def since(self, before: Seen) -> Seen:
        return Seen(
            {name: count - before.lanes[name] for name, count in self.lanes.items()},
            {name: count - before.classes[name] for name, count in self.classes.items()},
            self.refused - before.refused,
            self.program_id,
        )


def seen(host: Namespace) -> Seen:
    """What was counted, once no packet is between classifier and class."""
    deadline_s = time.monotonic() + 5
    while True:
        found = _seen(host)
        if found.lanes == found.classes or time.monotonic() > deadline_s:
            return found


def _seen(host: Namespace) -> Seen:
    def read() -> tuple[control.LinkStatus, Observed]:
        with Kernel() as kernel:
            return control.status("eth0")[0], kernel.read("eth0")

    link, observed = host.call(read)
    assert link.refused is not None
    assert link.state == "attached"
    assert observed.classifier is not None
    assert observed.classifier.program_id is not None
    return Seen(
        {band.name: band.packets for band in link.bands if band.name != DEFAULT_BAND},
        {band.name: observed.class_stats[band.classid].packets for band in lane_bands()},
        link.refused.packets,
        observed.classifier.program_id,
    )


def attach(host: Namespace, trust: Trust) -> str:
    """Attach the host's link with this trust; what attach calls the outcome."""
    return host.call(control.attach, LinkSettings("eth0", 10 * 10**9, trust=trust)).result


def run_all(*senders: BaseProcess) -> None:
    """Wait for processes to end, and well."""
    for sender in senders:
        sender.join(LIMIT_S)
        assert sender.exitcode == 0
