"""Parameter servers as processes of their own, by `tlsched server`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Started:
    """A server and the address it listens at."""

    process: subprocess.Popen[str]
    address: str

    def line(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def servers(count: int, *, token: str = "", jobs: int = 0) -> Iterator[list[Started]]:
    """``count`` of them on the loopback address."""
    argv = [sys.executable, "-m", "tlsched", "server", "--listen", "127.0.0.1:0"]
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):
            process = subprocess.Popen(
                [*argv, "--jobs", str(jobs)],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TLSCHED_SERVER_TOKEN": token},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(Started(process, ""))
        for one in started:
            one.address = one.line().removeprefix("listening at ")
        yield started
