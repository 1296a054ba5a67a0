"""server: a parameter server, for workers on other hosts."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

Listen = Annotated[
    str, typer.Option(help="Where workers connect: HOST:PORT, or [IPv6]:PORT. Port 0 is any free.")
]
Token = Annotated[
    str,
    typer.Option(
        envvar="TLSCHED_SERVER_TOKEN",
        show_envvar=True,
        help="Serve only workers that have the same; better in the environment than here, where "
        "every user of the host can read it.",
    ),
]
Jobs = Annotated[int, typer.Option(min=0, help="End after so many jobs; 0 is never.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(server)


def server(listen: Listen, token: Token = "", jobs: Jobs = 0) -> None:
    """Serve as a parameter server: sum what all workers of a job push, and send it back.

    Any number of jobs, also at once. Give all servers' addresses to every worker, in one order:

      tlsched.schedule(model, optimizer, backend="ps", servers=["10.0.0.5:7150", "10.0.0.6:7150"])

    Without a token whoever reaches the port can be served; with one it is still not encrypted.
    Listen on a network that only the cluster uses. Servers on the workers' own hosts, or as ranks
    of the job, are started by the workers and need none of this.

    A line on standard output says where it listens, then one for each job's beginning and end and
    for whoever is turned away. Ctrl-C or SIGTERM ends it; workers that it serves are told.

    Examples:

      tlsched server --listen 10.0.0.5:7150

      TLSCHED_SERVER_TOKEN=… tlsched server --listen [fd00::5]:7150 --jobs 1

    Exit codes: 0 its jobs are done, or it was asked to end; 2 it cannot listen there.
    """
    from tlsched.errors import HostError
    from tlsched.shim.ps.listening import listen as listen_at
    from tlsched.shim.ps.listening import parse_address
    from tlsched.shim.ps.server import Server
    from tlsched.shim.ps.wire import key_of

    address = parse_address(listen)
    try:
        listener = listen_at(address)
    except OSError as error:
        raise HostError(
            f"cannot listen at {listen} ({error.strerror or error})",
            hint="use an address of this host, and a port that nobody has",
        ) from error
    serving = Server(listener, key_of(token), typer.echo, jobs=jobs)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: serving.stop())
    host, port = listener.getsockname()[:2]
    typer.echo(f"listening at {f'[{host}]' if ':' in host else host}:{port}")
    serving.serve()
