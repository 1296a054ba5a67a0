"""What each kind of qdisc of ours is set to, as data: wanted or read, in the same words. Pure.

Sources: tc-htb(8), tc-bfifo(8), tc-ets(8), tc-prio(8), tc-mqprio(8); <linux/pkt_sched.h>.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Htb:
    """Hierarchical token buckets; ``default_minor`` is the class of what no class claims."""

    default_minor: int
    kind: ClassVar[str] = "htb"

    def describe(self) -> str:
        """The options in words."""
        return f"default class {self.default_minor:x}"


@dataclass(frozen=True, slots=True)
class Bfifo:
    """A FIFO bounded in bytes."""

    limit_bytes: int
    kind: ClassVar[str] = "bfifo"

    def describe(self) -> str:
        """The options in words."""
        return f"limit {self.limit_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Prio:
    """Strict bands, 0 first. ``priomap`` gives each skb->priority from 0 to 15 its band."""

    bands: int
    priomap: tuple[int, ...]
    kind: ClassVar[str] = "prio"

    def describe(self) -> str:
        """The options in words."""
        return f"{self.bands} strict bands, {_map(self.priomap)}"


@dataclass(frozen=True, slots=True)
class Ets:
    """Strict bands, then bands that share by deficit round robin (IEEE 802.1Qaz).

    ``quanta`` has the bytes a round of each band, 0 for the strict ones.
    """

    strict: int
    quanta: tuple[int, ...]
    priomap: tuple[int, ...]
    kind: ClassVar[str] = "ets"

    @property
    def bands(self) -> int:
        """How many bands there are, strict and sharing."""
        return len(self.quanta)

    def describe(self) -> str:
        """The options in words."""
        words = [f"{self.strict} strict bands"] if self.strict else []
        shared = " ".join(map(str, self.quanta[self.strict :]))
        words += [f"quanta {shared}"] if shared else []
        return f"{', '.join(words)}, {_map(self.priomap)}"


@dataclass(frozen=True, slots=True)
class Mq:
    """One qdisc for each transmit queue of a device."""

    kind: ClassVar[str] = "mq"

    def describe(self) -> str:
        """The options in words: there are none."""
        return "one qdisc for each transmit queue"


@dataclass(frozen=True, slots=True)
class Mqprio:
    """Traffic classes of the network card itself; ``queues`` is (count, first) of each class."""

    priomap: tuple[int, ...]
    queues: tuple[tuple[int, int], ...]
    hardware: int = 1
    kind: ClassVar[str] = "mqprio"

    @property
    def traffic_classes(self) -> int:
        """How many traffic classes there are."""
        return len(self.queues)

    def describe(self) -> str:
        """The options in words."""
        return f"{self.traffic_classes} traffic classes of the card, {_map(self.priomap)}"


Options = Htb | Bfifo | Prio | Ets | Mq | Mqprio


def _map(priomap: tuple[int, ...]) -> str:
    return f"priomap {' '.join(map(str, priomap))}"
