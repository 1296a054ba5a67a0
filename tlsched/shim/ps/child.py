"""The process of a server beside a worker: its settings on standard input, its port on output.

It serves one job. It ends with it, or when standard input closes: then the parent has died, and
the other workers are told that it was this rank; a parent that is done says so before.
"""

from __future__ import annotations

import json
import os
import signal
import time

from tlsched.shim.ps.listening import listen
from tlsched.shim.ps.server import Server
from tlsched.shim.ps.starting import DONE
from tlsched.shim.ps.wire import Trouble

# How long it stays for the others after its parent is done.
STAY_S = 10.0


def main() -> None:
    """Serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's, which then leaves
    settings = json.loads(_line())
    try:
        listener = listen((settings["host"], 0))
    except OSError as error:
        os.write(1, f"{error.strerror or error}\n".encode())
        return
    os.write(1, f"{listener.getsockname()[1]}\n".encode())
    server = Server(listener, bytes.fromhex(settings["key"]), _silent, jobs=1)
    server.watch(0, lambda: _hear(server, settings["rank"]))
    server.serve()


def _line() -> bytes:
    """The first line of standard input, and nothing of what follows."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


def _hear(server: Server, rank: int) -> None:
    """Something came from the parent, or its end."""
    if os.read(0, 1) == DONE:
        server.unwatch(0)
        server.end_by(time.monotonic() + STAY_S)
    else:
        server.stop(Trouble(f"rank {rank} left", rank, gone=True))


def _silent(_text: str) -> None:
    """The workers say what is wrong."""


if __name__ == "__main__":
    main()
