"""The tag program on real sockets: who gets which marks, and who else is on the cgroup."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import cgrouptree
from tests.netns import Namespace
from tlsched.bands import Band, lane_bands
from tlsched.ebpf import compiler, libbpf, tag
from tlsched.errors import ConfigError, ForeignProgram

pytestmark = pytest.mark.root

MULTI = 2
SIDES = ("listener", "client", "accepted")
V4, V6, MAPPED, DUAL = "v4", "v6", "mapped", "dual"

# Prints what each socket of a TCP connection over loopback has: [priority, TOS, traffic class].
# The listener of "dual" takes IPv4 peers on an IPv6 socket; "mapped" connects so.
SOCKETS = """
import json, socket, sys

def marks(sock):
    v6 = sock.family == socket.AF_INET6
    options = [(socket.SOL_SOCKET, socket.SO_PRIORITY), (socket.IPPROTO_IP, socket.IP_TOS)]
    values = [sock.getsockopt(*option) for option in options]
    return values + [sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if v6 else None]

listens = {"v4": "127.0.0.1", "v6": "::1", "mapped": "127.0.0.1", "dual": "::"}
connects = {"v4": "127.0.0.1", "v6": "::1", "mapped": "::ffff:127.0.0.1", "dual": "127.0.0.1"}
for case in sys.argv[1:]:
    here, there = listens[case], connects[case]
    families = [socket.AF_INET6 if ":" in text else socket.AF_INET for text in (here, there)]
    server = socket.create_server((here, 0), family=families[0], dualstack_ipv6=case == "dual")
    client = socket.socket(families[1])
    client.connect((there, server.getsockname()[1]))
    accepted, _ = server.accept()
    print(json.dumps([case, *map(marks, (server, client, accepted))]))
"""


def marks_of(namespace: Namespace, cgroup: Path, *cases: str) -> dict[str, list[list[int | None]]]:
    """For each case the marks of listener, client and accepted socket, all made in the cgroup."""
    argv = cgrouptree.inside(cgroup, sys.executable, "-c", SOCKETS, *cases)
    done = namespace.run(*argv)
    return {case: marks for case, *marks in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module", params=[0, 4], ids=["lane0", "lane4"])
def lane(request: pytest.FixtureRequest) -> Band:
    number: int = request.param
    return lane_bands()[number]


@pytest.fixture(scope="module")
def program(lane: Band) -> Iterator[compiler.LoadedProgram]:
    with tag.load(lane) as loaded:
        yield loaded


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with cgrouptree.cgroup() as path:
        yield path


@pytest.fixture
def namespace(make_netns: Callable[[], Namespace]) -> Namespace:
    return make_netns()


def test_every_socket_of_a_connection_is_marked(
    namespace: Namespace, cgroup: Path, program: compiler.LoadedProgram, lane: Band
) -> None:
    tag.attach(program, cgroup)
    seen = marks_of(namespace, cgroup, V4, V6, MAPPED, DUAL)
    assert list(seen) == [V4, V6, MAPPED, DUAL]
    for case, sockets in seen.items():
        for name, (priority, tos, traffic_class) in zip(SIDES, sockets, strict=True):
            assert priority == lane.priority, (case, name)
            # The byte that this socket's packets get; a socket for IPv6 only has no IPv4's.
            assert (traffic_class if case == V6 else tos) == lane.tos, (case, name)


def test_only_the_cgroup_is_marked(
    namespace: Namespace, cgroup: Path, program: compiler.LoadedProgram
) -> None:
    tag.attach(program, cgroup)
    with cgrouptree.cgroup() as beside:
        seen = marks_of(namespace, beside, V4, V6)
    assert {value for case in seen.values() for marks in case for value in marks} == {0, None}


def test_it_is_found_and_removed_again(
    cgroup: Path, program: compiler.LoadedProgram, lane: Band
) -> None:
    assert tag.tags_on(cgroup) == ()
    tag.attach(program, cgroup)
    (found,) = tag.tags_on(cgroup)
    assert found == tag.Tag(program.program_id, program.tag, lane.priority, lane.dscp)
    tag.detach(found, cgroup)
    assert tag.tags_on(cgroup) == ()


def test_the_innermost_cgroup_decides(
    namespace: Namespace, cgroup: Path, program: compiler.LoadedProgram, lane: Band
) -> None:
    other = lane_bands()[2]
    inner = cgroup / "inner"
    inner.mkdir()
    with tag.load(other) as outer_program, cgrouptree.foreign_program() as foreign:
        tag.attach(outer_program, cgroup)
        tag.attach(program, inner)
        assert cgrouptree.hang(foreign, inner, MULTI) == 0
        seen = marks_of(namespace, inner, V4)[V4]
        outside = marks_of(namespace, cgroup, V4)[V4]
    assert [marks[:2] for marks in seen] == [[lane.priority, lane.tos]] * 3
    assert [marks[:2] for marks in outside] == [[other.priority, other.tos]] * 3


@pytest.mark.parametrize("ours_first", [True, False])
def test_programs_of_others_keep_running(
    namespace: Namespace,
    cgroup: Path,
    program: compiler.LoadedProgram,
    lane: Band,
    ours_first: bool,
    tmp_path: Path,
) -> None:
    source = tmp_path / "counting.c"
    source.write_text(COUNTING)
    with compiler.compiled(source, "counting program") as module:
        counting = compiler.LoadedProgram(module.load("counting", compiler.ProgramType.SOCK_OPS))
    with counting:
        if ours_first:
            tag.attach(program, cgroup)
        assert cgrouptree.hang(counting.fd, cgroup, MULTI) == 0
        if not ours_first:
            tag.attach(program, cgroup)
        seen = marks_of(namespace, cgroup, V4)[V4]
        assert [marks[:2] for marks in seen] == [[lane.priority, lane.tos]] * 3
        assert _connections_counted(counting) == 2
        (found,) = tag.tags_on(cgroup)
        tag.detach(found, cgroup)
        assert cgrouptree.shown(cgroup) == ["counting"]


COUNTING = """
#define BPF_LICENSE GPL
#include <uapi/linux/bpf.h>
BPF_ARRAY(established, u64, 1);
int counting(struct bpf_sock_ops *skops)
{
    __u32 only = 0;
    u64 *count = established.lookup(&only);

    skops->reply = -1;
    if (count && (skops->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB ||
                  skops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB))
        __sync_fetch_and_add(count, 1);
    return 1;
}
"""


def _connections_counted(counting: compiler.LoadedProgram) -> int:
    _, (map_id,) = libbpf.program_info(counting.fd)
    value = (ctypes.c_uint64 * 1)()
    with libbpf.map_by_id(map_id) as fd:
        libbpf.lookup(fd, 0, value)
    return value[0]


@pytest.mark.parametrize("above", [False, True], ids=["on it", "above it"])
def test_a_program_that_insists_on_being_alone_is_respected(
    cgroup: Path, program: compiler.LoadedProgram, above: bool
) -> None:
    wanted = cgroup / "below" if above else cgroup
    wanted.mkdir(exist_ok=True)
    with cgrouptree.foreign_program() as foreign:
        assert cgrouptree.hang(foreign, cgroup, 0) == 0
        with pytest.raises(ForeignProgram, match="somebody else's"):
            tag.attach(program, wanted)
        assert cgrouptree.shown(cgroup) == ["other_sockops"]


def test_a_cgroup_that_is_gone_is_said(cgroup: Path, program: compiler.LoadedProgram) -> None:
    for action in (tag.tags_on, lambda path: tag.attach(program, path)):
        with pytest.raises(ConfigError, match="is gone"):
            action(cgroup / "gone")


def test_c_and_python_agree_on_the_map(program: compiler.LoadedProgram) -> None:
    assert program.name == tag.PROGRAM_NAME
    _, (map_id,) = libbpf.program_info(program.fd)
    with libbpf.map_by_id(map_id) as fd:
        info = libbpf.map_info(fd)
    assert (info.name.decode(), info.max_entries) == (tag.TAG_MAP, 1)
    assert (info.key_size, info.value_size) == (4, ctypes.sizeof(tag.TagValue))


def test_two_capabilities_are_enough(cgroup: Path) -> None:
    """Loading and hanging it on a cgroup without programs needs no CAP_SYS_ADMIN."""
    code = f"""
from pathlib import Path
from tlsched.bands import lane_bands
from tlsched.ebpf import tag
with tag.load(lane_bands()[1]) as program:
    tag.attach(program, Path({str(cgroup)!r}))
try:
    tag.tags_on(Path({str(cgroup)!r}))
except Exception as error:
    print(type(error).__name__, error)
"""
    keep = ("setpriv", "--bounding-set", "-all,+bpf,+net_admin", "--inh-caps", "-all")
    argv = [*keep, sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "PermissionMissing" in done.stdout
    assert "CAP_SYS_ADMIN" in done.stdout
    assert [each.priority for each in tag.tags_on(cgroup)] == [lane_bands()[1].priority]
