"""Trust as the classifier holds it: written when it is loaded, changed and read back in place.

A change takes effect while packets pass. At each moment of it whoever is trusted before and
after is trusted, and nobody is who was not before and is not after: new entries come first, then
the flags turn, then old entries go.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tlsched import cgroups
from tlsched.ebpf import abi, libbpf, maps
from tlsched.errors import ConfigError, FeatureMissing
from tlsched.trust import Prefix, Trust, parse_prefix, shown_prefixes

MapFd = Callable[[str], int]
Entries = dict[str, set[bytes]]  # the keys of each set

_SETS = (abi.UIDS_MAP, abi.CGROUPS_MAP, abi.V4_MAP, abi.V6_MAP)


@dataclass(frozen=True, slots=True)
class HeldTrust:
    """What the maps hold: ``settings`` flags about trust, cgroups by number, prefixes.

    ``cgroup_levels`` has bit n set when a group n levels below the root is trusted.
    """

    flags: int
    cgroup_levels: int
    cgroups: frozenset[int]
    uids: frozenset[int]
    sources: frozenset[Prefix]


def resolve(trust: Trust) -> HeldTrust:
    """The form in which the classifier holds ``trust``.

    Raises ConfigError for a cgroup that does not exist, FeatureMissing without cgroup v2.
    """
    groups = [cgroups.find(path) for path in trust.cgroups]
    levels = 0
    for group in groups:
        levels |= _levels(group)
    flags = abi.ANY_LOCAL if trust.any_local else 0
    flags |= abi.UIDS if trust.uids else 0
    flags |= abi.SOURCES if trust.sources else 0
    return HeldTrust(
        flags,
        levels,
        cgroups=frozenset(map(cgroups.cgroup_id, groups)),
        uids=frozenset(trust.uids),
        sources=frozenset(map(parse_prefix, trust.sources)),
    )


def name(held: HeldTrust) -> tuple[Trust, tuple[int, ...]]:
    """``held`` as people write it, and the numbers of trusted cgroups that are gone.

    A cgroup that is gone, or cannot be seen from here, is given by its number.
    """
    found, gone, why = dict[int, str](), tuple[int, ...](), "gone"
    try:
        found = _names(held.cgroups)
        gone = tuple(sorted(held.cgroups - found.keys()))
    except FeatureMissing:
        why = "not visible here"
    named = [found.get(each, f"number {each} ({why})") for each in held.cgroups]
    trust = Trust(tuple(sorted(named)), tuple(sorted(held.uids)), shown_prefixes(held.sources))
    return trust, gone


def _names(ids: frozenset[int]) -> dict[int, str]:
    """The names of these cgroups; those that are gone are left out."""
    found = dict[int, str]()
    if not ids:
        return found
    mount = cgroups.find_mount()
    for group in cgroups.walk(mount.point):
        with contextlib.suppress(OSError):  # gone since it was listed
            if (number := cgroups.cgroup_id(group)) in ids:
                found[number] = str(mount.root / group.relative_to(mount.point))
        if len(found) == len(ids):
            break
    return found


def _levels(group: Path) -> int:
    """The bit of its depth below the root; all of them where the root cannot be seen from here."""
    top = cgroups.find_mount().point
    if not cgroups.is_top(top):
        return (1 << abi.CGROUP_LEVELS) - 1
    level = len(group.relative_to(top).parts)
    if level >= abi.CGROUP_LEVELS:
        raise ConfigError(
            f'the cgroup "{group}" is more than {abi.CGROUP_LEVELS - 1} levels deep',
            hint="trust one that is above it",
        )
    return 1 << level


def read(program_id: int) -> HeldTrust:
    """The trust that a loaded classifier goes by; errors as of :func:`maps.read_counters`."""
    with _opened(program_id) as map_fd:
        settings = _settings(map_fd)
        present = _present(map_fd)
    return HeldTrust(
        flags=int(settings.flags) & ~abi.ETHERNET,
        cgroup_levels=settings.cgroup_levels,
        cgroups=frozenset(int.from_bytes(key, sys.byteorder) for key in present[abi.CGROUPS_MAP]),
        uids=frozenset(int.from_bytes(key, sys.byteorder) for key in present[abi.UIDS_MAP]),
        sources=frozenset(_prefix(key) for key in present[abi.V4_MAP] | present[abi.V6_MAP]),
    )


def has_room(program_id: int, held: HeldTrust) -> bool:
    """Whether a loaded classifier can be changed to ``held``; errors as of :func:`change`.

    Its sets have twice the room of one trust, for the old entries beside the new ones. After a
    change that was killed they hold entries of two trusts, and a third may be too much.
    """
    with _opened(program_id) as map_fd:
        present, wanted = _present(map_fd), _wanted(held)
    return all(len(present[each] | wanted[each]) <= abi.SET_ENTRIES for each in _SETS)


def change(program_id: int, held: HeldTrust) -> None:
    """Make a loaded classifier go by ``held``; errors as of :func:`maps.read_counters`."""
    with _opened(program_id) as map_fd:
        fill(map_fd, held, ethernet=bool(_settings(map_fd).flags & abi.ETHERNET))


def fill(map_fd: MapFd, held: HeldTrust, *, ethernet: bool) -> None:
    """Make the maps behind ``map_fd`` hold ``held``, whatever they held.

    ``ethernet`` says whether frames of the link begin with an Ethernet header.
    """
    old, present, wanted = _settings(map_fd), _present(map_fd), _wanted(held)
    # A set that no packet is looked up in, left by a change that was killed, is emptied first.
    idle = {each for each in _SETS if not _in_use(old, each)}
    _remove(map_fd, idle, present, wanted)
    for each in _SETS:
        for key in wanted[each] - present[each]:
            libbpf.update(map_fd(each), _key(each, key), ctypes.c_uint8(1))
    flags = held.flags | (abi.ETHERNET if ethernet else 0)
    levels = old.cgroup_levels | held.cgroup_levels
    # One word at a time, since a packet may come between two.
    for settings in ((old.flags, levels), (flags, levels)):
        libbpf.update(map_fd(abi.SETTINGS_MAP), 0, abi.SettingsValue(*settings))
    _remove(map_fd, set(_SETS) - idle, present, wanted)
    libbpf.update(map_fd(abi.SETTINGS_MAP), 0, abi.SettingsValue(flags, held.cgroup_levels))


def _remove(map_fd: MapFd, names: Collection[str], present: Entries, wanted: Entries) -> None:
    for each in names:
        for key in present[each] - wanted[each]:
            libbpf.delete(map_fd(each), _key(each, key))


def _in_use(settings: abi.SettingsValue, name: str) -> bool:
    if name == abi.CGROUPS_MAP:
        return bool(settings.cgroup_levels)
    return bool(settings.flags & (abi.UIDS if name == abi.UIDS_MAP else abi.SOURCES))


def _settings(map_fd: MapFd) -> abi.SettingsValue:
    value = abi.SettingsValue()
    libbpf.lookup(map_fd(abi.SETTINGS_MAP), 0, value)
    return value


def _present(map_fd: MapFd) -> Entries:
    return {
        each: {bytes(key) for key in libbpf.keys(map_fd(each), abi.SHAPES[each][0])}
        for each in _SETS
    }


def _wanted(held: HeldTrust) -> Entries:
    by_version = {
        version: {_prefix_key(each) for each in held.sources if each.version == version}
        for version in (4, 6)
    }
    return {
        abi.UIDS_MAP: {bytes(ctypes.c_uint32(uid)) for uid in held.uids},
        abi.CGROUPS_MAP: {bytes(ctypes.c_uint64(group)) for group in held.cgroups},
        abi.V4_MAP: by_version[4],
        abi.V6_MAP: by_version[6],
    }


def _key(name: str, key: bytes) -> abi.Datum:
    return abi.SHAPES[name][0].from_buffer_copy(key)


def _prefix_key(prefix: Prefix) -> bytes:
    packed = prefix.network_address.packed
    key_type = abi.V4Prefix if prefix.version == 4 else abi.V6Prefix
    return bytes(key_type(prefix.prefixlen, type(key_type().address)(*packed)))


def _prefix(key: bytes) -> Prefix:
    bits, address = int.from_bytes(key[:4], sys.byteorder), key[4:]
    return ipaddress.ip_network((address, bits))


@contextlib.contextmanager
def _opened(program_id: int) -> Iterator[MapFd]:
    """The descriptors of the program's settings and sets, by name."""
    with contextlib.ExitStack() as stack:
        fds = {
            each: stack.enter_context(maps.open_map(program_id, each))
            for each in (abi.SETTINGS_MAP, *_SETS)
        }
        yield fds.__getitem__
