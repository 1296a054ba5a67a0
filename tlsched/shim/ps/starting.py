"""Starting a server beside a worker: a child process that ends with the job, or with its parent."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

from tlsched.errors import CommunicationError

START_S = 60.0  # importing numpy on a busy host
END_S = 2.0
# What a parent writes when it leaves and nothing is wrong; see tlsched.shim.ps.child.
DONE = b"."


class Child:
    """A server on this host at ``host``, and its ``port``.

    Raises CommunicationError when it does not come up. ``rank`` is what it blames when this
    process dies.
    """

    def __init__(self, host: str, key: bytes, rank: int) -> None:
        folder = str(Path(__file__).parents[3])  # where tlsched lies, for its python to find
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tlsched.shim.ps.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.pid = self._process.pid
        settings = {"host": host, "key": key.hex(), "rank": rank}
        try:
            self._write(json.dumps(settings).encode() + b"\n")
            self.port = self._read_port(host)
        except BaseException:
            self._process.kill()
            self._reap()
            raise

    def end(self, *, abort: bool) -> None:
        """Have it end when its job is over, or at once with ``abort``. Does not wait long."""
        if not abort:
            self._write(DONE)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if abort:
            self._reap()
        else:  # the others may leave later
            threading.Thread(target=self._process.wait, name="tlsched server", daemon=True).start()

    def _read_port(self, host: str) -> int:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            ready, _, _ = select.select([stdout], [], [], START_S)
            line = stdout.readline().decode().strip() if ready else ""
        if not line.isdigit():
            raise CommunicationError(
                f"the server on {host} did not start ({line or f'no word within {START_S:g} s'})",
                hint="see what it wrote to standard error",
            )
        return int(line)

    def _write(self, what: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which shows elsewhere
            self._process.stdin.write(what)
            self._process.stdin.flush()

    def _reap(self) -> None:
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
