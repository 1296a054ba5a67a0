"""The TCP sockets that carry a lane's marks, and what waits in them, as the kernel tells.

Source: sock_diag(7), <linux/inet_diag.h>, <linux/tcp.h>. The socket's priority is what the kernel
answers for INET_DIAG_CLASS_ID when the socket has no net_cls class, asked for together with
the traffic class (net/ipv4/inet_diag.c, inet_diag_msg_attrs_fill).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from tlsched.errors import FeatureMissing
from tlsched.netlink import ask, attributes

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
_INFO, _TOS, _TCLASS, _CLASS_ID = 2, 5, 6, 17  # INET_DIAG_INFO and so on
_WANTED = 1 << _INFO - 1 | 1 << _TOS - 1 | 1 << _TCLASS - 1
# TCP_ESTABLISHED, FIN_WAIT1, CLOSE_WAIT, LAST_ACK, CLOSING: those that may have bytes to send.
_STATES = 1 << 1 | 1 << 4 | 1 << 8 | 1 << 9 | 1 << 11

_REQUEST = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2; an empty id asks for all
_MESSAGE = struct.Struct("=B3xHH16s16s12x4xIIII")  # struct inet_diag_msg
_U32 = struct.Struct("=I")
_NOTSENT_OFFSET = 144  # of tcpi_notsent_bytes in struct tcp_info


@dataclass(frozen=True, slots=True)
class LaneSocket:
    """A connection whose two marks are a lane's.

    ``unsent_bytes`` have not left the socket yet; ``unacked_bytes`` have, and wait in the band, on
    the wire or for their acknowledgement.
    """

    lane: str
    local: str
    peer: str
    unsent_bytes: int
    unacked_bytes: int


def lane_sockets(lanes: Mapping[tuple[int, int], str]) -> list[LaneSocket]:
    """This network namespace's sockets of ``lanes``: (priority, DSCP) to the lane's name.

    Most unsent bytes first. No privilege is needed. Raises FeatureMissing where the kernel has
    no inet_diag.
    """
    found = [_read(message, lanes) for message in (*_dump(socket.AF_INET), *_dump(socket.AF_INET6))]
    ours = [item for item in found if item is not None]
    return sorted(ours, key=lambda item: (-item.unsent_bytes, item.lane, item.local, item.peer))


def _dump(family: int) -> list[bytes]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _WANTED, _STATES)
    try:
        return list(ask(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, request, dump=True))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EPROTONOSUPPORT):
            raise
        raise FeatureMissing(
            "the kernel cannot list sockets (CONFIG_INET_DIAG)", hint="load the module tcp_diag"
        ) from error


def _read(message: bytes, lanes: Mapping[tuple[int, int], str]) -> LaneSocket | None:
    """The socket, or None if its marks are no lane's."""
    family, sport, dport, src, dst, _, queued, _, _ = _MESSAGE.unpack_from(message)
    values = dict(attributes(message[_MESSAGE.size :]))
    local, peer = _address(family, src), _address(family, dst)
    mapped = isinstance(peer, ipaddress.IPv6Address) and peer.ipv4_mapped is not None
    # To an IPv4 peer an IPv6 socket sends its TOS, else its traffic class (ip(7), ipv6(7)).
    tos = values.get(_TCLASS if family == socket.AF_INET6 and not mapped else _TOS, b"\0")[0]
    (priority,) = _U32.unpack(values.get(_CLASS_ID, bytes(4)))
    lane = lanes.get((priority, tos >> 2))
    if lane is None:
        return None
    info = values.get(_INFO, b"")
    known = len(info) >= _NOTSENT_OFFSET + _U32.size
    unsent = min(_U32.unpack_from(info, _NOTSENT_OFFSET)[0], queued) if known else queued
    return LaneSocket(
        lane, _shown(local, sport), _shown(peer, dport), unsent, unacked_bytes=queued - unsent
    )


def _address(family: int, raw: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(raw[:4] if family == socket.AF_INET else raw)


def _shown(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port_be: int) -> str:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    port = socket.ntohs(port_be)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
