"""Building, using and removing a lab."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from tlsched.errors import ConfigError, LabError
from tlsched.lab import congestion, iproute, namespaces, state
from tlsched.lab.describe import counters, description
from tlsched.lab.topology import (
    NIC,
    Host,
    Topology,
    check_rate,
    host_links,
    limiter,
    port,
    switch_links,
)

_counter = itertools.count()


class Lab:
    """Hosts in network namespaces on one bridge, every link limited to one rate both ways.

    ``with Lab(hosts=4, rate_bps=10**9) as lab`` builds it and removes it again, together with
    whatever still runs in it. The lab belongs to the process that built it: if that is killed, the
    next lab built on the machine removes it. Building needs CAP_NET_ADMIN and CAP_SYS_ADMIN.
    """

    def __init__(self, hosts: int, rate_bps: int, name: str | None = None) -> None:
        """Describe a lab; :meth:`up` builds it. Without ``name`` one is made up.

        Raises ConfigError for an impossible number of hosts, rate (bits per second) or name.
        """
        name = name or f"p{os.getpid()}-{next(_counter)}"
        self._topology = Topology(name, hosts, rate_bps)
        self._started: list[subprocess.Popen[Any]] = []

    @classmethod
    def open(cls, name: str) -> Lab:
        """An existing lab. Raises ConfigError when there is none called ``name``."""
        record = state.find(name)
        if record is None:
            raise ConfigError(f"there is no lab called {name}", hint="see `tlsched lab status`")
        topology = record.topology
        return cls(topology.host_count, topology.rate_bps, topology.name)

    @property
    def name(self) -> str:
        """The lab's name; its namespaces are called ``tlsched-NAME-…``."""
        return self._topology.name

    @property
    def rate_bps(self) -> int:
        """The rate of every link, in both directions."""
        return self._topology.rate_bps

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts, in order."""
        return self._topology.hosts

    @property
    def switch(self) -> str:
        """The namespace of the bridge; its interface ``portI`` leads to host I."""
        return self._topology.switch

    def __enter__(self) -> Lab:
        """Build it."""
        return self.up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove it."""
        self.down()

    def up(self, *, owned: bool = True) -> Lab:
        """Build it. With ``owned`` False no process owns it, and it stays until :meth:`down`.

        Raises PermissionMissing or FeatureMissing, or LabError when a lab of this name exists;
        a failure half-way leaves nothing behind.
        """
        if not self._up(state.Owner.current() if owned else None):
            raise LabError(
                f"a lab called {self.name} is up already",
                hint=f"use another name, or run `tlsched lab down --name {self.name}`",
            )
        return self

    def ensure(self) -> bool:
        """As :meth:`up` without an owner, but content with a lab of this name, whatever its size.

        Returns whether it was built; waits for whoever builds it at the same time.
        """
        return self._up(None)

    def _up(self, owner: state.Owner | None) -> bool:
        iproute.require()
        done = state.Record(self._topology, owner)
        begun = replace(done, builder=state.Owner.current())
        with state.locked():
            _remove_orphans()
            if state.find(self.name) is not None:
                return False
            self._check_free()
            begun.save()
            try:
                _build(self._topology)
                done.save()
            except BaseException:
                _remove(begun)
                raise
        return True

    def down(self) -> None:
        """End what runs in the lab and remove it; happy when there is none.

        Raises PermissionMissing, or LabError when another process, still running, owns the lab,
        or when a process inside cannot be ended.
        """
        if state.find(self.name) is None:
            return
        iproute.require()
        with state.locked():
            record = state.find(self.name)
            if record is not None:
                _refuse_anothers(record)
                _remove(record)
        for process in self._started:  # they have ended: let no zombie of ours remain
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
        self._started.clear()

    def popen(self, host: int, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` in the network namespace of host number ``host``.

        The process is ``argv``'s own (same pid, signals, exit code) and keeps the machine's mounts.
        ``popen_kwargs`` go to subprocess.Popen.
        """
        process = subprocess.Popen(self.command(host, argv), **popen_kwargs)
        self._started.append(process)
        return process

    def run(
        self, host: int, argv: Sequence[str], **run_kwargs: Any
    ) -> subprocess.CompletedProcess[Any]:
        """As :meth:`popen`, by subprocess.run; ends after 120 s unless ``timeout`` is given."""
        run_kwargs.setdefault("timeout", 120)
        return subprocess.run(self.command(host, argv), **run_kwargs)

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The argument list that starts ``argv`` in host number ``host``.

        Raises ConfigError when there is no such host or nothing to run.
        """
        if not 0 <= host < len(self.hosts):
            raise ConfigError(
                f"lab {self.name} has no host {host}",
                hint=f"it has {self.hosts[0].name} to {self.hosts[-1].name}",
            )
        if not argv:
            raise ConfigError("there is no command to run", hint="give a program and its arguments")
        target = namespaces.NETNS_DIR / self.hosts[host].namespace
        return ["nsenter", f"--net={target}", "--", *argv]

    def set_rate(self, rate_bps: int) -> None:
        """Give every link another rate, both ways, without losing a packet.

        It is the network that changes: where tlsched is attached, attach it anew with this rate,
        or the excess queues in the emulated card, which knows no bands.
        Raises ConfigError for an impossible rate.
        """
        check_rate(rate_bps)
        with state.locked():
            record = state.find(self.name)
            if record is None:
                raise LabError(f"lab {self.name} is not up", hint="build it first")
            changed = Topology(self.name, len(self.hosts), rate_bps)
            _limit(changed, verb="change")
            self._topology = changed
            state.Record(changed, record.owner).save()

    def set_congestion(self, name: str) -> None:
        """Give the hosts another TCP congestion control, for what they open from now on.

        Raises FeatureMissing when this kernel has none called ``name``.
        """
        with state.locked():
            congestion.allow(name)
        for host in self.hosts:
            namespaces.inside(host.namespace, lambda: congestion.choose(name))

    def describe(self) -> dict[str, Any]:
        """What a benchmark must record: kernel, sysctls, links and qdiscs with their counters."""
        return description(self._topology)

    def counters(self) -> dict[str, dict[str, int]]:
        """What each link has sent so far (see :func:`tlsched.lab.describe.counters`)."""
        return counters(self._topology)

    def complete(self) -> bool:
        """Whether all of the lab's namespaces are there."""
        return all((namespaces.NETNS_DIR / name).exists() for name in self._topology.namespaces)

    def processes(self) -> list[int]:
        """The pids of what runs in the lab."""
        return namespaces.processes(self._topology.namespaces)

    def _check_free(self) -> None:
        """Nobody else's namespaces may be taken for ours, and removed with them."""
        for name in self._topology.namespaces:
            if (namespaces.NETNS_DIR / name).exists():
                raise LabError(
                    f"a namespace {name} exists, and belongs to no lab",
                    hint=f"use another name, or run `ip netns delete {name}` if it is not needed",
                )


def _build(topology: Topology) -> None:
    congestion.allow()
    iproute.batch("ip", [f"netns add {name}" for name in topology.namespaces])
    iproute.batch("ip", switch_links(topology), topology.switch)
    ports = [port(index) for index in range(topology.host_count)]
    namespaces.inside(topology.switch, lambda: namespaces.enable_gro(*ports))
    for index, host in enumerate(topology.hosts):
        iproute.batch("ip", host_links(index, host), host.namespace)
        namespaces.inside(host.namespace, _prepare_host)
    _limit(topology, verb="add")


def _prepare_host() -> None:
    namespaces.enable_gro(NIC)
    congestion.choose()


def _limit(topology: Topology, *, verb: str) -> None:
    lines = []
    for index in range(topology.host_count):
        lines += limiter(port(index), topology.rate_bps, verb=verb)
    iproute.batch("tc", lines, topology.switch)
    for host in topology.hosts:
        iproute.batch("tc", limiter(NIC, topology.rate_bps, verb=verb), host.namespace)


def _remove(record: state.Record) -> None:
    """Take a lab away: its processes, its namespaces, its file. With the labs locked."""
    names = [name for name in record.topology.namespaces if (namespaces.NETNS_DIR / name).exists()]
    left = namespaces.end_processes(names)
    if left:
        raise LabError(
            f"processes {left} in lab {record.topology.name} cannot be ended",
            hint="they wait for the kernel (state D); try again when they have gone",
        )
    if names:
        iproute.batch("ip", [f"netns delete {name}" for name in names])
    record.remove()
    if not state.records():
        congestion.restore()


def remove_orphans() -> list[str]:
    """Remove the labs whose owners were killed, never another's; returns their names."""
    iproute.require()
    with state.locked():
        return _remove_orphans()


def _remove_orphans() -> list[str]:
    orphans = [record for record in state.records() if record.orphaned()]
    for record in orphans:
        _remove(record)
    return [record.topology.name for record in orphans]


def _refuse_anothers(record: state.Record) -> None:
    owner = record.owner
    if owner is not None and owner.alive() and owner != state.Owner.current():
        raise LabError(
            f"lab {record.topology.name} belongs to process {owner.pid}, which still runs",
            hint=f"it goes when that process ends; to hurry: kill {owner.pid}",
        )
