"""One netlink request and its answers, for the few families that pyroute2 does not serve.

Source: netlink(7), <linux/netlink.h>. Numbers are in the machine's byte order throughout.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLA_TYPE_MASK = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: length, type
_ERROR = struct.Struct("=i")
_BUFFER_BYTES = 1 << 16  # a dump's messages come in pieces of at most 32 KiB
_PATIENCE_S = 10.0


def ask(protocol: int, kind: int, payload: bytes, *, dump: bool = False) -> Iterator[bytes]:
    """Send one request to the kernel; yield the payload of its answer, or of each in a dump.

    Raises OSError with the kernel's error number (EOPNOTSUPP, ENODEV, ENOENT, EPERM, …).
    """
    flags = NLM_F_REQUEST | (NLM_F_DUMP if dump else 0)
    request = _HEADER.pack(_HEADER.size + len(payload), kind, flags, 1, 0) + payload
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as sock:
        sock.settimeout(_PATIENCE_S)
        sock.send(request)
        while True:
            for answer, body in _messages(sock.recv(_BUFFER_BYTES)):
                if answer == NLMSG_DONE:
                    return
                if answer == NLMSG_ERROR:
                    (code,) = _ERROR.unpack_from(body)
                    raise OSError(-code, os.strerror(-code))
                yield body
                if not dump:
                    return


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and value of each attribute in ``data``, nested ones as they are."""
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind & NLA_TYPE_MASK, data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded."""
    size = _ATTRIBUTE.size + len(value)
    return (_ATTRIBUTE.pack(size, kind) + value).ljust(_aligned(size), b"\0")


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
