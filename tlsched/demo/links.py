"""The links of a lab, which carry tlsched or a plain FIFO in turn."""

from __future__ import annotations

import subprocess
import sys

from tlsched.errors import LabError
from tlsched.lab import Lab


class Links:
    """Every host's link of ``lab``; to begin with nothing is attached."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._attached = False

    def order(self, *, ordered: bool) -> None:
        """Attach tlsched on all links, or detach it so that a plain FIFO remains."""
        if ordered != self._attached:
            self._command(["attach", "--rate", str(self._lab.rate_bps)] if ordered else ["detach"])
            self._attached = ordered

    def set_rate(self, rate_bps: int) -> None:
        """Give every link another rate, and tlsched too where it is attached."""
        self._lab.set_rate(rate_bps)
        if self._attached:
            self._command(["attach", "--rate", str(rate_bps)])

    def _command(self, arguments: list[str]) -> None:
        """Run ``tlsched`` with ``arguments`` on all hosts at once. Raises LabError."""
        begun = [
            self._lab.popen(
                index,
                [sys.executable, "-m", "tlsched", *arguments, "--iface", host.iface],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, host in enumerate(self._lab.hosts)
        ]
        said = [process.communicate(timeout=120)[1] for process in begun]
        for process, host, text in zip(begun, self._lab.hosts, said, strict=True):
            if process.returncode:
                raise LabError(f"`tlsched {arguments[0]}` failed on {host.name}", hint=text.strip())
