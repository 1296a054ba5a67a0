"""From a worker to a server: the connection for one lane, marked and welcomed."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from tlsched.bands import Band
from tlsched.errors import CommunicationError
from tlsched.shim.ps.channel import mark
from tlsched.shim.ps.listening import Address
from tlsched.shim.ps.wire import HEAD, TROUBLE_BYTES, Hello, Kind, read_trouble, unpack
from tlsched.shim.sockets import receive_exactly

CONNECT_S = 10.0  # how long a server may take to be there, and to answer
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Place:
    """A server: what messages call it, and where it listens."""

    name: str
    address: Address

    def __str__(self) -> str:
        host, port = self.address
        return f"{self.name} ([{host}]:{port})" if ":" in host else f"{self.name} ({host}:{port})"


def connect(place: Place, hello: Hello, band: Band | None) -> socket.socket:
    """The connection to ``place`` that ``hello`` introduces, with ``band``'s marks.

    Raises CommunicationError naming the server that cannot be reached, or turns this worker away.
    """
    try:
        sock = _patiently(place.address)
    except OSError as error:
        raise CommunicationError(
            f"{place} cannot be reached ({error.strerror or error})",
            hint="is it running, and reachable from this host?",
        ) from error
    try:
        if band is not None:
            mark(sock, band)
        sock.settimeout(CONNECT_S)
        sock.sendall(hello.pack())
        _be_welcomed(sock, place)
    except (OSError, ValueError) as error:
        sock.close()
        raise CommunicationError(
            f"{place} does not answer as a server ({error})",
            hint="is that the port of a `tlsched server`?",
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _be_welcomed(sock: socket.socket, place: Place) -> None:
    answer = unpack(receive_exactly(sock, HEAD.size))
    if answer.kind == Kind.WELCOME:
        return
    refusal = read_trouble(receive_exactly(sock, min(answer.length, TROUBLE_BYTES)))
    raise CommunicationError(
        f"{place} turns this worker away: {refusal.text}",
        hint="all workers need the same servers, token and version",
    )


def _patiently(address: Address) -> socket.socket:
    """A connection to ``address``, which may begin to listen only now. Raises OSError."""
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(address, max(0.1, end_s - time.monotonic()))
        except ConnectionRefusedError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_RETRY_S)
