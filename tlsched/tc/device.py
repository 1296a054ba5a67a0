"""What a network device is: its kind, its transmit queues, its speed, its slaves."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from typing import Any

from pyroute2 import IPRoute
from pyroute2.ethtool.ioctl import IoctlEthtool, NoSuchDevice, NotSupportedError
from pyroute2.netlink.exceptions import NetlinkError

IFF_LOOPBACK = 0x8  # <linux/if.h>
ARPHRD_ETHER, ARPHRD_LOOPBACK = 1, 772  # <linux/if_arp.h>
UNKNOWN_MBPS = (0, 0xFFFFFFFF)  # SPEED_UNKNOWN, <linux/ethtool.h>
# Devices made in software that pass on the speed of the cards below them. What others say, such
# as a veth's 10 Gbit/s or a tun's 10 Mbit/s, is nobody's speed.
PASS_ON_SPEED = frozenset({"vlan", "bond", "team", "macvlan"})
AGGREGATES = frozenset({"bond", "team"})


@dataclass(frozen=True, slots=True)
class Device:
    """One device. ``kind`` is that of a device made in software ("veth", "vlan"), else None.

    ``speed_bps`` in bit/s is None where the device has none or does not tell. ``tx_queues`` are
    those in use. ``slaves`` are named for a bond or team.
    """

    iface: str
    ifindex: int
    kind: str | None = None
    is_loopback: bool = False
    tx_queues: int = 1
    speed_bps: int | None = None
    slaves: tuple[str, ...] = ()
    has_ethernet_header: bool = True


def read_device(sock: IPRoute, ifindex: int) -> Device:
    """Read one device. Raises NetlinkError where there is none."""
    (link,) = sock.link("get", index=ifindex)
    info = link.get_attr("IFLA_LINKINFO")
    kind = None if info is None else info.get_attr("IFLA_INFO_KIND")
    iface = link.get_attr("IFLA_IFNAME")
    return Device(
        iface,
        ifindex,
        kind,
        is_loopback=bool(link["flags"] & IFF_LOOPBACK),
        tx_queues=_tx_queues(iface, link.get_attr("IFLA_NUM_TX_QUEUES") or 1),
        speed_bps=_speed_bps(iface) if kind is None or kind in PASS_ON_SPEED else None,
        slaves=_slaves(sock, ifindex) if kind in AGGREGATES else (),
        has_ethernet_header=link["ifi_type"] in (ARPHRD_ETHER, ARPHRD_LOOPBACK),
    )


def _tx_queues(iface: str, made: int) -> int:
    """How many queues are in use: of those ``made``, as many as the driver has channels."""
    if made == 1:
        return 1
    channels = _ask(iface, "get_channels")
    used = 0 if channels is None else int(channels.tx_count + channels.combined_count)
    return min(used, made) if used else made


def _speed_bps(iface: str) -> int | None:
    settings = _ask(iface, "get_link_settings")
    if settings is None or settings.speed in UNKNOWN_MBPS:
        return None
    return int(settings.speed) * 1_000_000


def _ask(iface: str, question: str) -> Any:
    """What the driver answers (SIOCETHTOOL, <linux/ethtool.h>); None when it does not.

    Raises NetlinkError (ENODEV) when no interface has that name any more.
    """
    with contextlib.closing(IoctlEthtool(iface)) as ethtool:
        try:
            return getattr(ethtool, question)()
        except NoSuchDevice as error:
            raise NetlinkError(errno.ENODEV) from error
        except (NotSupportedError, OSError):
            return None


def _slaves(sock: IPRoute, ifindex: int) -> tuple[str, ...]:
    links = sock.get_links()
    return tuple(
        link.get_attr("IFLA_IFNAME") for link in links if link.get_attr("IFLA_MASTER") == ifindex
    )
