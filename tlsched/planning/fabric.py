"""The fabric that a simulation runs on: hosts that are alike, and what a bucket costs there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlsched.errors import ConfigError

# Of an Ethernet frame of 1,514 bytes, as the links' token buckets count it, 1,448 are TCP payload
# (14 Ethernet, 20 IPv4, 32 TCP with timestamps).
PAYLOAD_SHARE = 1448 / 1514
# What a step of gloo's ring costs besides its bytes: wake-ups and a segment's way through two
# sockets. Measured with buckets of a few bytes on four hosts of the lab.
STEP_S = 150e-6
# How long rank 0's order takes to be heard and done by the others: a small message and a thread
# that wakes. Measured over loopback with four ranks on two cores.
ORDER_S = 200e-6
# Collectives of one lane that gloo works on at a time (ProcessGroupGloo's threads).
AT_ONCE = 1


@dataclass(frozen=True, slots=True)
class Fabric:
    """``hosts`` with a full-duplex link of ``rate_bps`` each to a switch that never blocks.

    All hosts hold the same share of every transfer, so that one host's link stands for all of them:
    a ring all-reduce (Patarasuk and Yuan, JPDC 2009) loads each link with 2 (n-1)/n of the bytes,
    in 2 (n-1) steps of which each costs ``step_s`` besides.

    With ``backend`` "ps" gradients are pushed to parameter servers and their sum is pulled, two
    steps. ``servers`` of them have hosts of their own, so that pushing and pulling load different
    links; with 0 every host has one beside its worker, and both load the same.

    An order that rank 0 dictates comes after ``order_s``. A ring is as fast as its slowest link, so
    where links differ ``rate_bps`` is the slowest one's.

    ``efficiency`` is the part of the rate that gradients get: the rest are headers and what a link
    stands idle between two packets.

    ``bulk_flows`` leave every host beside the training; ``share`` is what the default band is
    guaranteed. ``rate_changes`` are (seconds, bit/s) pairs in order. ``compute_factors`` holds for
    each host by how much its computing is slower (stragglers); empty: all alike. Raises
    ConfigError for what cannot be.
    """

    hosts: int
    rate_bps: float
    step_s: float = STEP_S
    efficiency: float = PAYLOAD_SHARE
    order_s: float = ORDER_S
    bulk_flows: int = 0
    share: float = 0.05
    rate_changes: tuple[tuple[float, float], ...] = ()
    compute_factors: tuple[float, ...] = ()
    backend: Literal["allreduce", "ps"] = "allreduce"
    servers: int = 0

    def __post_init__(self) -> None:
        """Check it."""
        least = min(self.step_s, self.order_s, self.bulk_flows, self.servers)
        if self.hosts < 1 or not self.rate_bps > 0 or least < 0:
            raise ConfigError(
                f"{self.hosts} hosts at {self.rate_bps:g} bit/s cannot be simulated",
                hint="give at least one host and a rate above zero",
            )
        if not 0 < self.efficiency <= 1:
            raise ConfigError(
                f"a link cannot carry {self.efficiency:g} of its rate",
                hint="give more than 0 and at most 1",
            )
        if any(not rate > 0 for _, rate in self.rate_changes):
            raise ConfigError("a link's rate falls to nothing", hint="give rates above zero")
        if self.compute_factors and len(self.compute_factors) != self.hosts:
            raise ConfigError(
                f"{len(self.compute_factors)} compute factors for {self.hosts} hosts",
                hint="give one for each host, 1.0 for one that is not slower",
            )

    @property
    def loads(self) -> tuple[float, ...]:
        """Bytes on each kind of link for each byte of a bucket.

        The outgoing link of every host; with servers on hosts of their own, the most loaded link
        that carries pushes, and then the one that carries pulls.
        """
        if self.servers and self.backend == "ps":
            load = max(1.0, self.hosts / self.servers) / self.efficiency
            return (load, load)
        return (2 * (self.hosts - 1) / self.hosts / self.efficiency,)

    def phases(self, *, immediate: bool) -> tuple[tuple[float, ...], ...]:
        """The loads of a transfer's parts, one after the other.

        A classical server (not ``immediate``) has to have all of a push before the pull begins.
        """
        if self.backend == "allreduce" or immediate:
            return (self.loads,)
        if self.servers:
            return ((self.loads[0], 0.0), (0.0, self.loads[1]))
        return ((self.loads[0] / 2,), (self.loads[0] / 2,))

    @property
    def start_s(self) -> float:
        """What a bucket's averaging costs besides its bytes."""
        return self.steps * self.step_s

    @property
    def steps(self) -> int:
        """Of a ring; or pushing and pulling."""
        return 2 if self.backend == "ps" else 2 * (self.hosts - 1)

    def seconds(self, size: float) -> float:
        """How long ``size`` bytes of gradients occupy a link that nothing else uses."""
        return size * self.loads[0] * 8 / self.rate_bps
