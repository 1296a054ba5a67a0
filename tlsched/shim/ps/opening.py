"""Servers found or started, and a context's lanes to them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tlsched.bands import Band
from tlsched.errors import CommunicationError, TlschedError
from tlsched.shim.agreement import Agreement
from tlsched.shim.lanes import Lane, open_lanes
from tlsched.shim.ps.client import Client
from tlsched.shim.ps.connecting import Place
from tlsched.shim.ps.lane import ServedLane, Session
from tlsched.shim.ps.listening import Address
from tlsched.shim.ps.starting import Child
from tlsched.shim.ps.wire import Hello

_ALONE = "127.0.0.1"  # a worker that has no connection to others


@dataclass(frozen=True, slots=True)
class Found:
    """Servers that are there, none if they are to be started, and what opens them."""

    places: tuple[Place, ...]
    key: bytes


def open_served_lanes(
    agreement: Agreement, found: Found, count: int, bands: Sequence[Band], *, hold: bool
) -> list[ServedLane]:
    """``count`` lanes from each worker of ``agreement`` to all servers, started if none are found.

    ``bands`` are the lanes' marks, empty when they carry none. Raises CommunicationError, on all
    workers, naming what is missing.
    """
    control = _control_lane(agreement, count)
    with ExitStack() as undo:
        undo.callback(control.close, abort=True)
        child: Child | None = None
        if not found.places:
            key = agreement.from_rank_0("key", secrets.token_bytes(32))
            child, places = _start_servers(agreement, control, key)
            found = Found(places, key)
        if child is not None:
            undo.callback(child.end, abort=True)
        job = agreement.from_rank_0("job", secrets.token_bytes(16))
        hello = Hello(job, found.key, agreement.rank, agreement.size, 0, count)
        client = _connect(agreement, found.places, hello, bands)
        session = Session(control, client, child, hold)
        undo.pop_all()
    return [ServedLane(index, session) for index in range(count)]


def address_of(lane: Lane) -> str:
    """This host's address, as ``lane``'s connections to other ranks have it."""
    if not lane.connections:
        return _ALONE
    return lane.connections[min(lane.connections)].local[0]


def _control_lane(agreement: Agreement, count: int) -> Lane:
    """A lane over the process group, counted after the ``count`` lanes to servers."""
    (control,) = open_lanes(agreement, 1)
    control.index = count
    agreement.roster.started = [0] * (count + 1)
    return control


def _start_servers(
    agreement: Agreement, control: Lane, key: bytes
) -> tuple[Child | None, tuple[Place, ...]]:
    """One on each host, by the first worker there; hosts are told apart by their addresses."""
    hosts = agreement.gather("host's address", address_of(control))
    child: Child | None = None
    mine: tuple[Address | None, str | None] = None, None
    if hosts.index(hosts[agreement.rank]) == agreement.rank:
        try:
            child = Child(hosts[agreement.rank], key, agreement.rank)
            mine = (hosts[agreement.rank], child.port), None
        except TlschedError as error:
            mine = None, error.message
    try:
        found = agreement.gather("server", mine)
        _raise_first(agreement, [problem for _, problem in found])
    except BaseException:
        if child is not None:
            child.end(abort=True)
        raise
    addresses = [address for address, _ in found if address is not None]
    return child, tuple(Place(f"server {n}", address) for n, address in enumerate(addresses))


def _connect(
    agreement: Agreement, places: Sequence[Place], hello: Hello, bands: Sequence[Band]
) -> Client:
    client: Client | None = None
    problem: str | None = None
    try:
        client = Client(places, hello, bands or [None] * hello.lanes)
    except CommunicationError as error:
        problem = error.message
    try:
        _raise_first(agreement, agreement.gather("connection to servers", problem))
    except BaseException:
        if client is not None:
            client.close(abort=True)
        raise
    assert client is not None
    return client


def _raise_first(agreement: Agreement, problems: Sequence[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            agreement.roster.blamed = rank
            raise CommunicationError(
                f"on {agreement.roster.name(rank)}, {problem}",
                hint="see docs/parameter-servers.md for what servers need",
            )
