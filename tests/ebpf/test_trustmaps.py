"""A change of trust, looked at after each single write of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.ebpf import testrun
from tests.ebpf.frames import IPV4, IPV6, ethernet, ipv4, ipv6
from tlsched.bands import all_bands, lane_bands
from tlsched.ebpf import abi, libbpf, maps, program, trustmaps
from tlsched.ebpf.trustmaps import HeldTrust
from tlsched.trust import ANY_LOCAL, make_trust

pytestmark = [pytest.mark.root, pytest.mark.stock_kernel]

LANE = lane_bands()[0]
# The socket of a test run is root's, in the cgroup of the process.
TRUSTS = (
    ANY_LOCAL,
    make_trust(uids=[0]),
    make_trust(uids=[1, 2]),
    make_trust(["/"]),
    make_trust(["/"], [1], ["10.0.0.0/8", "fd00::/8"]),
    make_trust(uids=[0, 2], sources=["10.1.0.0/16", "fd00::/16"]),
    make_trust(sources=["10.2.0.0/16", "10.1.2.3"]),
)


def frame4(source: str) -> bytes:
    return ethernet(ipv4(LANE.dscp or 0, source=bytes(map(int, source.split(".")))), IPV4)


def frame6(start: str) -> bytes:
    return ethernet(ipv6(LANE.dscp or 0, source=bytes.fromhex(start) + bytes(14)), IPV6)


# Of each packet the frame and the interface that it came in by.
PROBES = (
    (frame4("10.1.2.3"), 0),
    *((frame4(f"10.{second}.2.3"), 1) for second in (1, 2, 3)),
    (frame4("11.0.0.1"), 1),
    (frame6("fd00"), 1),
    (frame6("fd01"), 1),
)


def decisions(fd: int) -> list[bool]:
    """Which of the probes get into the lane."""
    results = (
        testrun.run(fd, frame, priority=LANE.priority or 0, ingress_ifindex=way_in)
        for frame, way_in in PROBES
    )
    return [result.priority == LANE.classid for result in results]


@pytest.fixture
def apart() -> Iterator[program.Classifier]:
    """A classifier of this test's own, since its trust changes."""
    with program.load(all_bands()) as loaded:
        yield loaded


def test_no_write_opens_a_gap(apart: program.Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is trusted before and after always is; who is neither before nor after never is."""
    held = [trustmaps.resolve(trust) for trust in TRUSTS]
    rights = {}
    for each in held:
        trustmaps.change(apart.program_id, each)
        rights[each] = decisions(apart.fd)
    assert len({tuple(right) for right in rights.values()}) > 4, "too much alike"
    writes = 0

    def looked_at(real: Callable[..., None], old: HeldTrust, new: HeldTrust) -> Callable[..., None]:
        def write(*given: object) -> None:
            nonlocal writes
            real(*given)
            writes += 1
            ways = zip(rights[old], rights[new], decisions(apart.fd), strict=True)
            for before, after, now in ways:
                assert now in (before, after)

        return write

    for old, new in itertools.permutations(held, 2):
        trustmaps.change(apart.program_id, old)
        with monkeypatch.context() as patched:
            for name in ("update", "delete"):
                patched.setattr(libbpf, name, looked_at(getattr(libbpf, name), old, new))
            trustmaps.change(apart.program_id, new)
        assert trustmaps.read(apart.program_id) == new
    assert writes > 200


def test_what_a_killed_change_left_is_cleared_before_it_counts(
    apart: program.Classifier,
) -> None:
    """An entry of a set that no flag names is nobody's; turning the flag on must not revive it."""
    left = trustmaps.resolve(make_trust(uids=[0], sources=["10.1.0.0/16"]))
    trustmaps.change(apart.program_id, left)
    with maps.open_map(apart.program_id, abi.SETTINGS_MAP) as fd:
        libbpf.update(fd, 0, abi.SettingsValue(abi.ETHERNET | abi.ANY_LOCAL, 0))
    assert trustmaps.read(apart.program_id) != left
    wanted = trustmaps.resolve(make_trust(uids=[1], sources=["10.2.0.0/16"]))
    trustmaps.change(apart.program_id, wanted)
    assert trustmaps.read(apart.program_id) == wanted
    assert decisions(apart.fd) == [False, False, True, False, False, False, False]
