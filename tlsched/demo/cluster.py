"""A lab whose hosts run one rank each, and links that carry tlsched or a plain FIFO in turn."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any

from tlsched.demo.training import Job, Result
from tlsched.errors import LabError, TrainingError
from tlsched.lab import Lab

MASTER_PORT = 29500
JOB_TIMEOUT_S = 180.0

# mallopt(3): gradients' memory is kept for the next iteration, as a GPU's caching allocator does.
# Otherwise every large gradient is unmapped, mapped and faulted in again, under every policy.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


class Cluster:
    """One worker process on every host of ``lab``. Use as a context manager."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._workers: list[subprocess.Popen[str]] = []
        self._log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        self._attached = False

    def __enter__(self) -> Cluster:
        """Start the workers."""
        for rank, host in enumerate(self._lab.hosts):
            environment = (
                os.environ
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(self._lab.hosts)),
                    "MASTER_ADDR": self._lab.hosts[0].ipv4,
                    "MASTER_PORT": str(MASTER_PORT),
                    "GLOO_SOCKET_IFNAME": host.iface,
                    "OMP_NUM_THREADS": "1",
                }
                | KEEP_MEMORY
            )
            self._workers.append(
                self._lab.popen(
                    rank,
                    [sys.executable, "-m", "tlsched.demo.worker"],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                )
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers; the lab ends whatever does not."""
        for worker in self._workers:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(timeout=10 if kind is None else 0.1)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._log.close()

    def train(self, job: Job) -> list[Result]:
        """Every rank's result of ``job``. Raises TrainingError when one fails or takes too long."""
        self._order_links(ordered=job.policy == "kernel")
        line = json.dumps(asdict(job)) + "\n"
        for worker in self._workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(line)
                worker.stdin.flush()
            except BrokenPipeError:
                raise self._failure(f"a rank ended before {job.part}/{job.policy}") from None
        return [
            Result(**json.loads(self._answer(rank, worker, job)))
            for rank, worker in enumerate(self._workers)
        ]

    def _answer(self, rank: int, worker: subprocess.Popen[str], job: Job) -> str:
        assert worker.stdout is not None
        readable, _, _ = select.select([worker.stdout], [], [], JOB_TIMEOUT_S)
        line = worker.stdout.readline() if readable else ""
        if not line:
            why = "ended" if readable else f"did not answer within {JOB_TIMEOUT_S:g} s"
            raise self._failure(f"rank {rank} {why} while training {job.part}/{job.policy}")
        return line

    def _failure(self, what: str) -> TrainingError:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return TrainingError(what, hint=f"its last words: {lines[-1] if lines else 'none'}")

    def _order_links(self, *, ordered: bool) -> None:
        """Attach tlsched on every host's link, or detach it so that a plain FIFO remains."""
        if ordered == self._attached:
            return
        verb = ["attach", "--rate", str(self._lab.rate_bps)] if ordered else ["detach"]
        for index, host in enumerate(self._lab.hosts):
            command = [sys.executable, "-m", "tlsched", *verb, "--iface", host.iface]
            done: subprocess.CompletedProcess[Any] = self._lab.run(
                index, command, capture_output=True, text=True
            )
            if done.returncode:
                raise LabError(
                    f"`tlsched {verb[0]}` failed on {host.name}", hint=done.stderr.strip()
                )
        self._attached = ordered
