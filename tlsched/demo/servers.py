"""Parameter servers on some hosts of a lab."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from tlsched.errors import LabError
from tlsched.lab import Lab

PORT = 7150
_LISTENING = "listening at "
_END_S = 10.0


class Servers:
    """`tlsched server` on each of ``hosts`` (their numbers). Use as a context manager.

    ``addresses`` are what :func:`tlsched.schedule` is given. They serve one job after another.
    """

    def __init__(self, lab: Lab, hosts: Sequence[int]) -> None:
        self.addresses = tuple(f"{lab.hosts[host].ipv4}:{PORT}" for host in hosts)
        self._lab = lab
        self._hosts = tuple(hosts)
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Servers:
        """Start them, and return when all listen. Raises LabError when one does not."""
        for host, address in zip(self._hosts, self.addresses, strict=True):
            self._processes.append(
                self._lab.popen(
                    host,
                    [sys.executable, "-m", "tlsched", "server", "--listen", address],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            )
        for process, address in zip(self._processes, self.addresses, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(_LISTENING):
                self.__exit__(None, None, None)
                raise LabError(f"no server listens at {address}", hint=line.strip() or "it ended")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End them."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
