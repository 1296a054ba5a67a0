"""One change at a time: a lock on an interface that leaves no file behind.

It is an abstract UNIX socket (unix(7)): such names belong to the network namespace, as
interfaces do, and the kernel drops them when the holder ends, however it ends.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tlsched.errors import HostError

WAIT_S = 10.0


@contextmanager
def interface_lock(ifindex: int, iface: str, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of an interface; wait for whoever holds it, ``wait_s`` at most.

    Raises HostError, naming the holder's process, when it does not let go in time.
    """
    name = f"\0tlsched/link/{ifindex}"
    deadline_s = time.monotonic() + wait_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mine:
        while not _bound(mine, name):
            left_s = deadline_s - time.monotonic()
            holder = _wait_for_holder(name, max(left_s, 0.0))
            # Anybody may hold the name, and one who keeps letting go must not keep us here.
            if holder is not None or left_s <= 0:
                who = f"process {holder}" if holder else "an unknown process"
                raise HostError(
                    f"{who} has been changing {iface} for {wait_s:g} s",
                    hint="wait for it, or end it, and try again",
                )
        mine.listen()
        yield


def _bound(mine: socket.socket, name: str) -> bool:
    try:
        mine.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _wait_for_holder(name: str, wait_s: float) -> int | None:
    """Wait until the holder lets go: None when it did, its process id when time is up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.settimeout(wait_s or 1e-3)
        try:
            other.connect(name)
        except (ConnectionRefusedError, BlockingIOError, TimeoutError):
            # Gone again, or bound and not yet listening, or as many are waiting as it lets.
            time.sleep(min(0.01, wait_s))
            return None if wait_s else 0
        peer = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", peer)[0]
        try:
            other.recv(1)  # the holder never sends or accepts: this ends when it closes
        except TimeoutError:
            return pid
        except ConnectionResetError:
            return None
        return None
