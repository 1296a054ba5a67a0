"""Addresses of servers: written as HOST:PORT, and listened at."""

from __future__ import annotations

import socket

from tlsched.errors import ConfigError

Address = tuple[str, int]
# What workers and `tlsched server` must have in common, where that is wanted.
TOKEN_VARIABLE = "TLSCHED_SERVER_TOKEN"


def parse_address(text: str) -> Address:
    """``HOST:PORT`` or ``[IPv6]:PORT``. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (colon and bare and port.isascii() and port.isdigit()) or (
        ":" in bare and not bracketed
    ):
        raise ConfigError(
            f"{text!r} is no address of a server",
            hint="write HOST:PORT, for instance 10.0.0.5:7150 or [fd00::5]:7150",
        )
    if int(port) > 65535:
        raise ConfigError(f"there is no port {port}", hint="use 1 to 65535")
    return bare, int(port)


def listen(address: Address) -> socket.socket:
    """A listener at ``address``; port 0 is any that is free. Raises OSError."""
    host, port = address
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener
