"""Bulk TCP flows beside a training: iperf3 from each host of a lab to the next."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from statistics import fmean
from types import TracebackType
from typing import Any

from tlsched.errors import LabError
from tlsched.lab import Lab

PORT = "5201"
LONGEST_S = 3600
SETTLE_S = 1.5  # slow start, and the first of iperf3's seconds
_START_S = 10.0


class BulkFlows:
    """``count`` flows out of every host of ``lab`` while the context is open; none for 0."""

    def __init__(self, lab: Lab, count: int) -> None:
        self._lab = lab
        self._count = count
        self._servers: list[subprocess.Popen[Any]] = []
        self._clients: list[tuple[float, subprocess.Popen[Any]]] = []
        self._intervals: list[tuple[float, float, float]] = []

    def __enter__(self) -> BulkFlows:
        """Start them, and wait until they flow."""
        if self._count:
            try:
                self._start()
            except BaseException:
                self._end()
                raise
            time.sleep(SETTLE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End them, and read what they got."""
        try:
            if kind is None:
                for began_s, client in self._clients:
                    client.send_signal(signal.SIGINT)
                    self._read(began_s, client.communicate(timeout=20)[0])
        finally:
            self._end()

    def rate_bps(self, begin_s: float, end_s: float) -> float:
        """What a host's flows sent together from ``begin_s`` to ``end_s``, by CLOCK_MONOTONIC.

        The mean over hosts of iperf3's seconds that lie inside. Only when the flows have ended.
        """
        inside = [bps for begin, end, bps in self._intervals if begin_s <= begin and end <= end_s]
        if self._count and not inside:
            raise LabError("iperf3 tells nothing of that time", hint="measure for longer")
        return fmean(inside) if inside else 0.0

    def _start(self) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for index in range(len(self._lab.hosts)):
            server = ["iperf3", "--server", "--port", PORT]
            self._servers.append(self._lab.popen(index, server, **quiet))
        for index in range(len(self._lab.hosts)):
            self._wait_for_server(index)
        for index in range(len(self._lab.hosts)):
            target = self._lab.hosts[(index + 1) % len(self._lab.hosts)].ipv4
            client = ["iperf3", "--client", target, "--port", PORT, "--json", "--interval", "1"]
            client += ["--time", str(LONGEST_S), "--parallel", str(self._count)]
            process = self._lab.popen(index, client, stdout=subprocess.PIPE, text=True)
            self._clients.append((time.monotonic(), process))

    def _wait_for_server(self, index: int) -> None:
        end_s = time.monotonic() + _START_S
        listening = ["ss", "-Hltn", f"sport = :{PORT}"]
        while not self._lab.run(index, listening, capture_output=True, check=True).stdout:
            if time.monotonic() > end_s:
                raise LabError("iperf3 does not listen", hint="is the package iperf3 installed?")
            time.sleep(0.05)

    def _read(self, began_s: float, output: str) -> None:
        for interval in json.loads(output)["intervals"]:
            total = interval["sum"]
            bounds = began_s + total["start"], began_s + total["end"]
            self._intervals.append((*bounds, total["bits_per_second"]))

    def _end(self) -> None:
        for process in [*(client for _, client in self._clients), *self._servers]:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
