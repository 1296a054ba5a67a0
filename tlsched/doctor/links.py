"""The interfaces of this network namespace, as rtnetlink tells (RTM_GETLINK, rtnetlink(7))."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tlsched.netlink import ask, attributes

NETLINK_ROUTE, RTM_GETLINK = 0, 18
IFF_UP, IFF_LOOPBACK = 0x1, 0x8  # <linux/if.h>
# <linux/if_link.h>
_IFLA_IFNAME, _IFLA_LINK, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 5, 18, 1
_IFLA_LINK_NETNSID = 37  # there when the interface below is in another namespace
_IFLA_GSO_MAX_SIZE, _IFLA_GSO_IPV4_MAX_SIZE = 41, 63
_IFINFO = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, change
_U32 = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Link:
    """One interface. ``kind`` is that of a device made in software ("veth", "vlan"), else None.

    ``lower`` is the interface that this one stands on, None where there is none or where it is in
    another namespace. ``gso_max_bytes`` is the largest packet that the device takes to cut up.
    """

    iface: str
    ifindex: int
    kind: str | None
    lower: str | None
    is_loopback: bool
    is_up: bool
    gso_max_bytes: int

    @property
    def is_physical(self) -> bool:
        """Whether it is no device made in software, as far as the kernel tells."""
        return self.kind is None and not self.is_loopback


def read_links() -> list[Link]:
    """All interfaces, in the kernel's order."""
    answers = list(ask(NETLINK_ROUTE, RTM_GETLINK, _IFINFO.pack(0, 0, 0, 0, 0), dump=True))
    names = {_index(answer): _name(answer) for answer in answers}
    return [_link(answer, names) for answer in answers]


def _link(answer: bytes, names: dict[int, str]) -> Link:
    _, _, ifindex, flags, _ = _IFINFO.unpack_from(answer)
    values = dict(attributes(answer[_IFINFO.size :]))
    info = dict(attributes(values.get(_IFLA_LINKINFO, b"")))
    kind = info.get(_IFLA_INFO_KIND)
    elsewhere = kind == b"veth\0" or _IFLA_LINK_NETNSID in values
    lower = 0 if elsewhere else _number(values.get(_IFLA_LINK))
    sizes = (values.get(_IFLA_GSO_MAX_SIZE), values.get(_IFLA_GSO_IPV4_MAX_SIZE))
    return Link(
        names[ifindex],
        ifindex,
        kind=None if kind is None else kind.rstrip(b"\0").decode(),
        lower=names.get(lower) if lower != ifindex else None,
        is_loopback=bool(flags & IFF_LOOPBACK),
        is_up=bool(flags & IFF_UP),
        gso_max_bytes=max(map(_number, sizes)),
    )


def _index(answer: bytes) -> int:
    return int(_IFINFO.unpack_from(answer)[2])


def _name(answer: bytes) -> str:
    name = dict(attributes(answer[_IFINFO.size :]))[_IFLA_IFNAME].rstrip(b"\0")
    return name.decode(errors="backslashreplace")  # an interface's name may be any bytes


def _number(value: bytes | None) -> int:
    return 0 if value is None else int(_U32.unpack(value)[0])
