"""A lab whose hosts run one rank each."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import IO

from tlsched.demo.job import Job, Result
from tlsched.demo.links import Links
from tlsched.errors import TrainingError
from tlsched.lab import Lab

MASTER_PORT = 29500
JOB_TIMEOUT_S = 600.0

# mallopt(3): gradients' memory is kept for the next iteration, as a GPU's caching allocator does.
# Otherwise every large gradient is unmapped, mapped and faulted in again, under every policy.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


@dataclass(slots=True)
class _Worker:
    """A rank's process, which reads jobs and writes results, and what it says beside that."""

    process: subprocess.Popen[str]
    log: IO[str]

    def last_words(self) -> str:
        """The last line of its standard error."""
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        return lines[-1] if lines else "nothing"


class Cluster:
    """One worker process on each of ``lab``'s first ``hosts`` (default: all).

    Use as a context manager. Several of them on one lab need a ``master_port`` each, and share its
    ``links``.
    """

    def __init__(
        self,
        lab: Lab,
        *,
        hosts: int | None = None,
        links: Links | None = None,
        master_port: int = MASTER_PORT,
    ) -> None:
        self._size = hosts or len(lab.hosts)
        self.links = links or Links(lab)
        self._lab = lab
        self._master_port = master_port
        self._workers: list[_Worker] = []

    def __enter__(self) -> Cluster:
        """Start the workers."""
        for rank in range(self._size):
            self._workers.append(self._start(rank))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers and leave the links as they were; the lab ends whatever does not."""
        for worker in self._workers:
            assert worker.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()
        for worker in self._workers:
            try:
                worker.process.wait(timeout=10 if kind is None else 0.1)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.log.close()
        if kind is None:
            self.links.order(ordered=False)

    def train(self, job: Job) -> list[Result]:
        """Every rank's result of ``job``. Raises TrainingError when one fails or takes too long."""
        self.links.order(ordered=job.policy == "kernel")
        self.begin(job)
        return self.results(job)

    def begin(self, job: Job) -> None:
        """Have ``job`` begun on the links as they are; :meth:`results` are due next."""
        line = json.dumps(asdict(job)) + "\n"
        for rank, worker in enumerate(self._workers):
            assert worker.process.stdin is not None
            try:
                worker.process.stdin.write(line)
                worker.process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank, "ended", job) from None

    def results(self, job: Job) -> list[Result]:
        """Every rank's result of ``job``, which was begun. Raises as :meth:`train`."""
        return [Result(**json.loads(answer)) for answer in self._answers(job)]

    def _start(self, rank: int) -> _Worker:
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "MASTER_ADDR": self._lab.hosts[0].ipv4,
            "MASTER_PORT": str(self._master_port),
            "GLOO_SOCKET_IFNAME": self._lab.hosts[rank].iface,
            "OMP_NUM_THREADS": "1",
        }
        log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        process = self._lab.popen(
            rank,
            [sys.executable, "-m", "tlsched.demo.worker"],
            env=environment | KEEP_MEMORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        return _Worker(process, log)

    def _answers(self, job: Job) -> list[str]:
        """A line of each rank, by rank; whoever ends first without one is named."""
        answers: dict[int, str] = {}
        end_s = time.monotonic() + JOB_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._workers):
                ready = selector.select(max(0.0, end_s - time.monotonic()))
                if not ready:
                    late = next(r for r in range(len(self._workers)) if r not in answers)
                    raise self._failure(late, f"did not answer within {JOB_TIMEOUT_S:g} s", job)
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]  # a text stream
                    if not line:
                        raise self._failure(key.data, "ended", job)
                    answers[key.data] = line
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in sorted(answers)]

    def _failure(self, rank: int, what: str, job: Job) -> TrainingError:
        return TrainingError(
            f"rank {rank} {what} while training {job.part} with policy {job.policy}",
            hint=f"its last words: {self._workers[rank].last_words()}",
        )
