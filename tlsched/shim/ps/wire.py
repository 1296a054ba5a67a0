"""What workers and servers tell each other: a hello, then records of one fixed head and a payload.

All numbers are in network byte order; payloads are as they lie in the workers' memory, so all hosts
of a job need the same byte order (the hello shows it).
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tlsched.bands import LANE_COUNT, Band

VERSION = 1
MAGIC = b"tlsched" + (b"<" if sys.byteorder == "little" else b">")
WORKERS_AT_MOST = 4096
TROUBLE_BYTES = 4096  # a server's last words are no longer

HEAD = struct.Struct("!BBBxIIQQ")
_HELLO = struct.Struct("!8sHHHHIIBB2x16s32s")
HELLO_BYTES = _HELLO.size
_UNMARKED = 255


class Kind(IntEnum):
    """What a record is."""

    SEGMENT = 1  # worker: a part of a gradient; server: its sum
    BYE = 2  # worker: nothing more comes from me, and nothing is wrong
    TROUBLE = 3  # server: the job is over, the payload says why
    WELCOME = 4  # server: the hello was accepted


class Head(NamedTuple):
    """What comes before a payload of ``length`` bytes.

    The payload lies at byte ``start`` of the lane's sum number ``number``, which has ``total``
    bytes of dtype ``code`` (see :mod:`tlsched.shim.ps.adding`). With ``hold`` its sum is sent back
    only with that of the next segment that has no ``hold``.
    """

    kind: int
    code: int
    hold: int
    length: int
    number: int
    start: int
    total: int

    def pack(self) -> bytes:
        """As it travels."""
        return HEAD.pack(*self)

    def __str__(self) -> str:
        """As an error message tells it."""
        return (
            f"bytes {self.start} to {self.start + self.length} of sum {self.number}, "
            f"{self.total} bytes of type {self.code}"
        )


def unpack(raw: bytes | bytearray | memoryview) -> Head:
    """The head in ``raw``."""
    return Head(*HEAD.unpack(raw))


@dataclass(frozen=True, slots=True)
class Hello:
    """How a worker introduces a connection: of which job, which worker, for which lane.

    ``job`` is random and the same for all connections of a job. ``key`` proves that the worker may
    use the server (:func:`key_of`). ``priority`` and ``dscp`` are the lane's marks, None when it
    carries none.
    """

    job: bytes
    key: bytes
    rank: int
    workers: int
    lane: int
    lanes: int
    priority: int | None = None
    dscp: int | None = None

    def pack(self) -> bytes:
        """As it travels."""
        marks = [_UNMARKED if mark is None else mark for mark in (self.priority, self.dscp)]
        whole = (self.lane, self.lanes, 0, self.rank, self.workers, *marks, self.job, self.key)
        return _HELLO.pack(MAGIC, VERSION, *whole)

    @property
    def band(self) -> Band | None:
        """The lane's marks."""
        if self.priority is None or self.dscp is None:
            return None
        return Band(f"lane{self.lane}", self.lane, self.priority, self.dscp)


def read_hello(raw: bytes | bytearray) -> Hello:
    """The hello in ``raw``. Raises ValueError saying what is wrong with it."""
    magic, version, lane, lanes, _, rank, workers, priority, dscp, job, key = _HELLO.unpack(raw)
    if magic[:-1] != MAGIC[:-1]:
        raise ValueError("it is no worker of tlsched's")
    if magic != MAGIC:
        raise ValueError("its host has another byte order")
    if version != VERSION:
        raise ValueError(f"it speaks version {version}, and this server version {VERSION}")
    if not (1 <= lanes <= LANE_COUNT and lane < lanes):
        raise ValueError(f"it asks for lane {lane} of {lanes}")
    if not (1 <= workers <= WORKERS_AT_MOST and rank < workers):
        raise ValueError(f"it says that it is rank {rank} of {workers}")
    if (priority, dscp) == (_UNMARKED, _UNMARKED):
        return Hello(job, key, rank, workers, lane, lanes)
    if priority > LANE_COUNT or dscp > 63:
        raise ValueError(f"it asks for priority {priority} and DSCP {dscp}")
    return Hello(job, key, rank, workers, lane, lanes, priority, dscp)


def key_of(token: str) -> bytes:
    """What proves that somebody knows ``token``; nothing where there is none."""
    return hashlib.sha256(token.encode()).digest() if token else bytes(32)


class Trouble(NamedTuple):
    """Why a server ends a job: ``text``, and what ``rank`` has to do with it.

    It is the one to blame, if any; ``gone`` tells that it left, otherwise ``text`` says what it
    did.
    """

    text: str
    rank: int | None = None
    gone: bool = False

    def record(self) -> bytes:
        """As it travels, head and all."""
        short = self._replace(text=self.text[: TROUBLE_BYTES // 8])  # an escape has six bytes
        payload = json.dumps(short._asdict()).encode()
        return Head(Kind.TROUBLE, 0, 0, len(payload), 0, 0, 0).pack() + payload


def read_trouble(payload: bytes | bytearray | memoryview) -> Trouble:
    """The trouble in ``payload``. Raises ValueError when there is none."""
    try:
        return Trouble(**json.loads(bytes(payload)))
    except TypeError as error:
        raise ValueError(str(error)) from None
