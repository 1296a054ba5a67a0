"""Who may use the lanes: written by the administrator, checked, and said in words. Pure.

Both marks are needed in any case; trust says whose marks count. Without cgroups and uids every
socket of the host is trusted, which suits a host with one tenant. Packets that the host only
forwards have no socket: they are trusted by their source address, and none of them by default.
"""

from __future__ import annotations

import contextlib
import ipaddress
import pwd
from collections.abc import Iterable
from dataclasses import dataclass

from tlsched.errors import ConfigError

Prefix = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_ENTRIES = 1024  # of each kind; the classifier's maps have as much room
MAX_UID = 2**32 - 2  # the largest number is no user: (uid_t)-1, setreuid(2)
# Where a user namespace has no number for a user the kernel says this one instead (proc(5)).
OVERFLOW_UID = 65534


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose marks count; :func:`make_trust` makes one of what people write.

    ``cgroups`` are paths below the mount of cgroup v2, and stand for what is below them too;
    ``uids`` are owners of sockets. A socket is trusted that either names, or any when both are
    empty. ``sources`` are the prefixes, v4 and v6, from which forwarded packets are trusted.
    """

    cgroups: tuple[str, ...] = ()
    uids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def any_local(self) -> bool:
        """Whether every socket of this host is trusted."""
        return not self.cgroups and not self.uids

    def describe(self) -> str:
        """Who is trusted, in one line."""
        parts = ["every local socket"] if self.any_local else []
        parts += [f"{kind} {named}" for kind, named in _named(self).items() if named]
        return ", ".join(parts)


ANY_LOCAL = Trust()


def make_trust(
    cgroups: Iterable[str] = (), uids: Iterable[int | str] = (), sources: Iterable[str] = ()
) -> Trust:
    """Trust of what flags or a file say: a uid may be a user's name, order does not matter.

    Raises ConfigError for what cannot name a cgroup, a user or a prefix.
    """
    trust = Trust(
        cgroups=tuple(sorted({_cgroup(path) for path in cgroups})),
        uids=tuple(sorted({_uid(user) for user in uids})),
        sources=shown_prefixes(parse_prefix(source) for source in sources),
    )
    check_trust(trust)
    return trust


def check_trust(trust: Trust) -> None:
    """Raise ConfigError unless each entry of ``trust`` can be what it says."""
    for path in trust.cgroups:
        _cgroup(path)
    for uid in trust.uids:
        _uid(uid)
    for source in trust.sources:
        parse_prefix(source)
    for kind in (trust.cgroups, trust.uids, trust.sources):
        if len(kind) > MAX_ENTRIES:
            raise ConfigError(
                f"{len(kind)} entries are more than trust can hold ({MAX_ENTRIES} of a kind)",
                hint="name what they have in common: a parent cgroup, a shorter prefix",
            )


def describe_change(old: Trust, new: Trust) -> str:
    """The line that a dry run prints: what changes, from what to what."""
    before = {"local sockets": _local(old), **_named(old)}
    after = {"local sockets": _local(new), **_named(new)}
    steps = [
        f"{kind} {before[kind] or 'none'} -> {after[kind] or 'none'}"
        for kind in before
        if before[kind] != after[kind]
    ]
    # Written alike and yet to be changed: a change was killed, or cgroups were seen from elsewhere.
    return f"change trust: {'; '.join(steps) or f'write anew {new.describe()}'}"


def shown_prefixes(prefixes: Iterable[Prefix]) -> tuple[str, ...]:
    """Prefixes in one order (v4 first, then by address), each once."""
    ordered = sorted(set(prefixes), key=lambda each: (each.version, each.network_address.packed))
    return tuple(map(str, ordered))


def parse_prefix(source: str) -> Prefix:
    """The prefix that ``source`` names; a bare address stands for itself. Raises ConfigError."""
    hint = 'write "10.0.0.0/8", "fd00::/8" or a single address'
    if isinstance(source, str) and "%" not in source:  # numbers and zones would pass, too
        with contextlib.suppress(ValueError):
            return ipaddress.ip_network(source)
        with contextlib.suppress(ValueError):
            hint = f'write "{ipaddress.ip_network(source, strict=False)}" to mean all of it'
    raise ConfigError(f'trusted source "{source}" is no address prefix', hint=hint)


def _local(trust: Trust) -> str:
    return "any" if trust.any_local else "listed"


def _named(trust: Trust) -> dict[str, str]:
    return {
        "cgroups": ", ".join(trust.cgroups),
        "uids": ", ".join(map(str, trust.uids)),
        "sources": ", ".join(trust.sources),
    }


def _cgroup(path: str) -> str:
    """The path in its one form: no slash at its end, none doubled."""
    parts = path.split("/") if isinstance(path, str) else ["?"]
    if parts[0] or len(parts) < 2 or {".", ".."} & set(parts) or "\0" in path:
        raise ConfigError(
            f'trusted cgroup "{path}" is not an absolute path',
            hint='write what /proc/PID/cgroup shows after "0::", such as "/training.slice"',
        )
    return "/" + "/".join(filter(None, parts))


def _uid(user: int | str) -> int:
    if isinstance(user, bool) or not isinstance(user, (int, str)):
        raise ConfigError(f"trusted uid {user} is no user", hint="write a number or a user's name")
    try:
        number = int(user) if isinstance(user, int) or user.isdecimal() else _uid_of_name(user)
    except ValueError:  # more digits than int() reads
        number = MAX_UID + 1
    if not 0 <= number <= MAX_UID:
        raise ConfigError(f"trusted uid {user} is out of range", hint=f"use 0 to {MAX_UID}")
    if number == OVERFLOW_UID:
        raise ConfigError(
            f"uid {OVERFLOW_UID} (nobody) cannot be trusted: it stands for every user that the"
            " kernel cannot name",
            hint="let training run as a user of its own",
        )
    return number


def _uid_of_name(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # ValueError: it holds a zero byte
        raise ConfigError(
            f'there is no user "{name}" to trust', hint="see `getent passwd`, or give the number"
        ) from None
