"""Servers as the last ranks of a job: they serve where workers train, and end where workers do."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch.distributed as dist

from tlsched.errors import CommunicationError, ConfigError
from tlsched.shim.agreement import Agreement
from tlsched.shim.lanes import open_lanes
from tlsched.shim.ps.connecting import Place
from tlsched.shim.ps.listening import Address, listen
from tlsched.shim.ps.opening import Found, address_of
from tlsched.shim.ps.server import Server


class ServingEnded(SystemExit):
    """The workers have left: the process of a rank that served ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def meet(
    group: dist.ProcessGroup,
    timeout_s: float,
    servers: int,
    facts: Sequence[str],
) -> tuple[Agreement, Found]:
    """The workers' agreement and the servers; ``facts`` must be equal on all ranks.

    On the last ``servers`` ranks of ``group`` it serves until the workers leave, and raises
    ServingEnded, or CommunicationError where something went wrong.
    """
    workers = group.size() - servers
    if workers < 1:
        raise ConfigError(
            f"{servers} servers leave no worker among {group.size()} ranks",
            hint="start more ranks, or use fewer servers",
        )
    whole = Agreement(group, timeout_s)
    whole.require_same("policy", facts)
    key = whole.from_rank_0("key", secrets.token_bytes(32))
    (lane,) = open_lanes(whole, 1)
    try:
        address: Address | None = None
        if whole.rank >= workers:
            listener = listen((address_of(lane), 0))
            address = address_of(lane), listener.getsockname()[1]
        addresses = whole.gather("server's address", address)
    finally:
        lane.close(abort=False)
    if whole.rank >= workers:
        _serve(Server(listener, key, _silent, jobs=1), timeout_s)
    places = tuple(
        Place(f"server {number}, {whole.roster.name(workers + number)}", address)
        for number, address in enumerate(addresses[workers:])
        if address is not None
    )
    return Agreement(group, timeout_s, size=workers), Found(places, key)


def _serve(server: Server, timeout_s: float) -> None:
    server.begin_within(timeout_s)
    server.serve()
    if server.trouble is not None:
        raise CommunicationError(
            f"the job that this rank served ended: {server.trouble.text}",
            hint="see the workers' own errors",
        )
    raise ServingEnded


def _silent(_text: str) -> None:
    """Nobody looks at this rank: what ended the job is raised."""
