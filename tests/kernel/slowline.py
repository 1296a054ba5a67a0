"""A device that pushes back: SLIP over a pseudo terminal that nobody reads until a test does.

A veth takes every packet at once, and so no queue ever forms in a tree that shapes to no rate. A
serial line takes the next packet when the last one was written (net: slip.c, sl_xmit).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests import netns
from tests.netns import Namespace

TIOCSETD, SIOCGIFNAME, N_SLIP = 0x5423, 0x8910, 1  # <asm-generic/ioctls.h>, <linux/tty.h>
END, ESC, ESC_END, ESC_ESC = b"\xc0", b"\xdb", b"\xdb\xdc", b"\xdb\xdd"  # RFC 1055
ADDRESS, PEER = "10.98.0.1", "10.98.0.2"


@dataclass
class Line:
    """One end is the interface ``dev`` of ``host``, the other is read here."""

    host: Namespace
    dev: str
    master: int
    pending: bytes = b""

    def frames(self, wait_s: float) -> Iterator[bytes]:
        """IPv4 packets in the order in which they leave, until none comes for ``wait_s``."""
        while select.select([self.master], [], [], wait_s)[0]:
            self.pending += os.read(self.master, 4096)
            *whole, self.pending = self.pending.split(END)
            for frame in whole:
                packet = frame.replace(ESC_END, END).replace(ESC_ESC, ESC)
                if packet[:1] and packet[0] >> 4 == 4:
                    yield packet


@contextlib.contextmanager
def slow_line(make: Callable[[], Namespace]) -> Iterator[Line]:
    """A line in a namespace of its own, up and addressed; skips where the kernel has no SLIP."""
    subprocess.run(["modprobe", "slip"], capture_output=True, check=False)
    host = make()
    master, slave = pty.openpty()
    try:
        tty.setraw(slave)
        try:
            fcntl.ioctl(slave, TIOCSETD, struct.pack("i", N_SLIP))
        except OSError:
            pytest.skip("kernel lacks SLIP (CONFIG_SLIP)")
        answer = fcntl.ioctl(slave, SIOCGIFNAME, bytes(64))
        dev = answer.split(b"\0")[0].decode()
        netns.run("ip", "link", "set", dev, "netns", host.name)
        host.run("ip", "address", "add", ADDRESS, "peer", PEER, "dev", dev)
        host.run("ip", "link", "set", dev, "mtu", "1500", "up")
        yield Line(host, dev, master)
    finally:
        os.close(slave)
        os.close(master)
