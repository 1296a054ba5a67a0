"""What a lab consists of, as data: names, addresses, queue sizes, and the commands that build it.

Pure functions: nothing here touches the machine. The lists of lines are input for
``ip -batch -`` and ``tc -batch -`` (ip(8), tc(8)).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from tlsched.errors import ConfigError

PREFIX = "tlsched-"
IFACE = "eth0"  # what a program in a host, and `tlsched attach`, see
NIC = "nic0"  # the emulated network card below it
MTU = 1500
MAX_HOSTS = 64
MIN_RATE_BPS = 1_000_000
MAX_RATE_BPS = 400_000_000_000

# RFC 2544's benchmarking range (RFC 5735) and a ULA (RFC 4193): neither is routed anywhere.
_IPV4_BASE = IPv4Address("198.18.0.0")
_IPV6_BASE = IPv6Address("fd74:6c73:6368::")
_LINK_LOCAL_BASE = IPv6Address("fe80::")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}")


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a lab: ``name`` is h0, h1, …; ``namespace`` a name under /run/netns."""

    name: str
    namespace: str
    ipv4: str
    ipv6: str
    iface: str = IFACE


@dataclass(frozen=True, slots=True)
class Topology:
    """A lab's name, its number of hosts and the rate of every link in both directions."""

    name: str
    host_count: int
    rate_bps: int

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be built."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot name a lab",
                hint="use up to 40 letters, digits, '_', '.' or '-', not starting with '.' or '-'",
            )
        if not 1 <= self.host_count <= MAX_HOSTS:
            raise ConfigError(
                f"a lab of {self.host_count} hosts is not possible", hint=f"use 1 to {MAX_HOSTS}"
            )
        check_rate(self.rate_bps)

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{PREFIX}{self.name}-switch"

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts, in order."""
        return tuple(
            Host(
                name=f"h{index}",
                namespace=f"{PREFIX}{self.name}-h{index}",
                ipv4=str(_IPV4_BASE + index + 1),
                ipv6=str(_IPV6_BASE + index + 1),
            )
            for index in range(self.host_count)
        )

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces of the lab, the switch first."""
        return (self.switch, *(host.namespace for host in self.hosts))


def check_rate(rate_bps: int) -> None:
    """Raise ConfigError unless a link can have this rate."""
    if not MIN_RATE_BPS <= rate_bps <= MAX_RATE_BPS:
        raise ConfigError(
            f"a link of {rate_bps} bit/s is not possible",
            hint=f"use {MIN_RATE_BPS} to {MAX_RATE_BPS} bit/s",
        )


def port(index: int) -> str:
    """The switch's interface towards host ``index``."""
    return f"port{index}"


def burst_bytes(rate_bps: int) -> int:
    """Token bucket: 6 ms of the rate, at least two GSO packets of 64 KiB.

    More than a tree's 4 ms: what the tree releases at once must not queue again in the card, which
    knows no bands.
    """
    return max(128 * 1024, rate_bps // 8 * 6 // 1000)


def queue_bytes(rate_bps: int) -> int:
    """Longest queue of a limiter: 10 ms of the rate, at least four GSO packets of 64 KiB."""
    return max(256 * 1024, rate_bps // 8 // 100)


def switch_links(topology: Topology) -> list[str]:
    """`ip -n SWITCH -batch`: the bridge, and one port for every host."""
    lines = [
        "link set lo up",
        # No spanning tree, or ports would stay silent for 30 s; no multicast snooping, or
        # neighbour discovery would depend on a querier.
        "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        "link set br0 addrgenmode none",
        "link set br0 up",
    ]
    for index, host in enumerate(topology.hosts):
        lines += [
            f"link add {port(index)} mtu {MTU} type veth"
            f" peer name {NIC} mtu {MTU} netns {host.namespace}",
            f"link set {port(index)} addrgenmode none",
            f"link set {port(index)} master br0 up",
        ]
    return lines


def host_links(index: int, host: Host) -> list[str]:
    """`ip -n HOST -batch`: eth0 over nic0, with addresses that are usable at once."""
    return [
        "link set lo up",
        f"link set {NIC} addrgenmode none",
        f"link set {NIC} up",
        f"link add link {NIC} name {host.iface} type macvlan mode passthru",
        f"link set {host.iface} addrgenmode none",
        f"link set {host.iface} up",
        f"address add {host.ipv4}/24 dev {host.iface}",
        # nodad: duplicate address detection would hold the address back for a second.
        f"address add {host.ipv6}/64 dev {host.iface} nodad",
        f"address add {_LINK_LOCAL_BASE + index + 1}/64 dev {host.iface} nodad",
    ]


def limiter(dev: str, rate_bps: int, *, verb: str = "add") -> list[str]:
    """`tc -batch`: a FIFO that sends at ``rate_bps``; ``verb`` change alters one that exists.

    HTB and not TBF: TBF would have to cut GSO packets larger than its bucket, and counts a
    packet's bytes otherwise than the tree that it is compared with.
    """
    burst = burst_bytes(rate_bps)
    root = [f"qdisc add dev {dev} root handle 1: htb default 1"] if verb == "add" else []
    return [
        *root,
        f"class {verb} dev {dev} parent 1: classid 1:1 htb rate {rate_bps}bit"
        f" ceil {rate_bps}bit burst {burst} cburst {burst} quantum 65536",
        f"qdisc {verb} dev {dev} parent 1:1 handle 10: bfifo limit {queue_bytes(rate_bps)}",
    ]
