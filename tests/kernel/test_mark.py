"""`tlsched run` and `mark` with a program that knows nothing of lanes: iperf3, on a real link."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from typer.testing import CliRunner

from tests import cgrouptree
from tests.ebpf import wire
from tests.kernel import hostcli
from tests.kernel.hostcli import TLSCHED, tlsched
from tests.netns import End, Pair
from tlsched import cgroups, control, marking
from tlsched.bands import DEFAULT_DSCPS, lane_bands
from tlsched.cli import mark as commands
from tlsched.config import LinkSettings
from tlsched.ebpf import tag
from tlsched.errors import ConfigError, HostError
from tlsched.marking import Marking

pytestmark = pytest.mark.root

app = typer.Typer()
commands.register(app)
RUNNER = CliRunner()

PORT = "5201"
BYTES = 1 << 20
SYN = 2


@pytest.fixture
def link(netns_pair: Pair) -> Pair:
    """``a`` sends over an attached link to ``b``."""
    hostcli.attach(netns_pair.a, netns_pair.a.dev)
    return netns_pair


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with cgrouptree.cgroup() as path:
        yield path


def addresses_of(end: End) -> tuple[str, ...]:
    """The last one makes iperf3 open an IPv6 socket and send IPv4 packets."""
    return end.v4, end.v6, f"::ffff:{end.v4}"


def serve(where: End, *wrapper: str, bind: str | None = None) -> subprocess.Popen[str]:
    """An iperf3 server on all addresses unless ``bind``, once it listens."""
    argv = ["iperf3", "--server", *(["--bind", bind] if bind else [])]
    server = where.popen(*wrapper, *argv, stdout=subprocess.DEVNULL)
    listening = ("ss", "-Hltn", f"sport = :{PORT}")
    cgrouptree.eventually(lambda: where.run(*listening).stdout != "", "iperf3 listens")
    return server


def transfer(where: End, address: str, *argv: str, wrapper: tuple[str, ...] = ()) -> None:
    client = ("iperf3", "--client", address, "--bytes", str(BYTES), *argv)
    where.run(*wrapper, *client)


def frames_from(listener: wire.Listener, sender: End) -> list[Ether]:
    """The TCP frames of ``sender`` that have arrived, oldest first."""
    frames = []
    listener.sock.settimeout(0.1)
    try:
        while True:
            frame = Ether(listener.sock.recv(128))
            if frame.src == sender.mac and TCP in frame:
                frames.append(frame)
    except TimeoutError:
        return frames
    finally:
        listener.close()


def dscps(frames: list[Ether]) -> set[int]:
    return {(frame[IP].tos if IP in frame else frame[IPv6].tc) >> 2 for frame in frames}


def lane_bytes(link: Pair) -> dict[str, int]:
    (status,) = hostcli.status(link.a)
    return {band.name: band.bytes for band in status.bands}


def listen(link: Pair) -> wire.Listener:
    listener = wire.Listener(link.b, link.b.dev)
    listener.sock.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE, asm/socket.h
    return listener


def test_clients_are_in_their_lane_from_their_first_packet_on(link: Pair) -> None:
    server = serve(link.b)
    listener = listen(link)
    transfers = " && ".join(
        f"iperf3 --client {address} --bytes {BYTES}" for address in addresses_of(link.b)
    )
    link.a.run(*TLSCHED, "run", "--lane", "2", "--", "sh", "-c", transfers)
    server.kill()
    server.wait()
    check_wire(listener, link, lane=2)


def test_a_server_is_in_its_lane_from_its_first_packet_on(link: Pair) -> None:
    """It listens on one IPv6 socket for all; a v4 client makes it accept a mapped address."""
    server = serve(link.a, *TLSCHED, "run", "--lane", "5", "--")
    listener = listen(link)
    for address in addresses_of(link.a):
        transfer(link.b, address, "--reverse")
    server.kill()
    server.wait()
    check_wire(listener, link, lane=5)


def check_wire(listener: wire.Listener, link: Pair, lane: int) -> None:
    """All that ``a`` sent, handshakes included, bore the lane's DSCP and was counted there."""
    frames = frames_from(listener, link.a)
    handshakes = sum(1 for frame in frames if frame[TCP].flags & SYN)
    assert handshakes == 6  # three transfers, each with a connection for control
    assert {IP in frame for frame in frames} == {True, False}
    assert dscps(frames) == {DEFAULT_DSCPS[lane]}
    counted = lane_bytes(link)
    # On a busy machine iperf3's server may hang up before it has read the last of a transfer.
    assert counted[f"lane{lane}"] > 2 * BYTES
    assert counted["default"] < 10_000


def test_a_marked_cgroup_carries_a_client_and_unmarked_it_does_not(
    link: Pair, cgroup: Path
) -> None:
    server = serve(link.b, bind=link.b.v4)
    for lane, expected in ((3, "lane3"), (0, "lane0"), (None, "default")):
        if lane is None:
            marking.unmark(cgroup)
        else:
            marking.mark(cgroup, lane_bands()[lane])
        before = lane_bytes(link)
        transfer(link.a, link.b.v4, wrapper=tuple(cgrouptree.inside(cgroup)))
        grown = {name: count - before[name] for name, count in lane_bytes(link).items()}
        # iperf3 closes while some of it is in its socket still, and a busy machine loses that.
        assert [name for name, count in grown.items() if count > BYTES // 4] == [expected]
    server.kill()
    server.wait()


def test_the_attached_links_say_which_dscps(netns_pair: Pair) -> None:
    code_points = (46, 34, 26, 18, 14, 10)
    settings = LinkSettings(netns_pair.a.dev, 10**9, dscps=code_points)
    assert netns_pair.a.call(marking.lane_band, 0).dscp == DEFAULT_DSCPS[0]
    netns_pair.a.call(control.attach, settings)
    assert netns_pair.a.call(marking.lane_band, 0).dscp == 46
    assert netns_pair.a.call(marking.lane_band, 0, DEFAULT_DSCPS).dscp == DEFAULT_DSCPS[0]
    netns_pair.a.run("ip", "link", "add", "second0", "type", "veth", "peer", "name", "second1")
    hostcli.attach(netns_pair.a, "second0")
    with pytest.raises(ConfigError, match="different DSCPs"):
        netns_pair.a.call(marking.lane_band, 0)


def test_mark_change_and_unmark(cgroup: Path) -> None:
    assert mine(cgroup) == []
    dry = marking.mark(cgroup, lane_bands()[2], dry_run=True)
    assert (dry.result, dry.dry_run, mine(cgroup)) == ("marked", True, [])
    for lane, result in ((2, "marked"), (2, "unchanged"), (4, "changed")):
        outcome = marking.mark(cgroup, lane_bands()[lane])
        assert (outcome.result, outcome.lane) == (result, lane)
    band = lane_bands()[4]
    assert mine(cgroup) == [Marking(str(cgroup), 4, band.priority, band.dscp, processes=0)]
    assert marking.unmark(cgroup, dry_run=True).result == "unmarked"
    assert [marking.unmark(cgroup).result for _ in range(2)] == ["unmarked", "unchanged"]
    assert mine(cgroup) == []


def test_unmark_leaves_the_programs_of_others(cgroup: Path) -> None:
    with cgrouptree.foreign_program() as foreign:
        assert cgrouptree.hang(foreign, cgroup, 2) == 0
        for lane in (1, 3):
            marking.mark(cgroup, lane_bands()[lane])
            assert cgrouptree.shown(cgroup) == ["other_sockops", "tlsched_tag"]
        marking.unmark(cgroup)
        assert cgrouptree.shown(cgroup) == ["other_sockops"]


def test_a_second_program_of_ours_goes_with_the_next_mark(cgroup: Path) -> None:
    with tag.load(lane_bands()[0]) as program:
        marking.mark(cgroup, lane_bands()[1])
        tag.attach(program, cgroup)  # as a mark of another version, without the lock, might
        assert len(mine(cgroup)) == 2
    assert marking.mark(cgroup, lane_bands()[3]).result == "changed"
    assert [each.lane for each in mine(cgroup)] == [3]


def test_one_change_at_a_time(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups.lock, "__defaults__", (0.1,))
    with open(cgroup / "cgroup.procs", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(HostError, match="locked"):
            marking.mark(cgroup, lane_bands()[1])
    assert marking.mark(cgroup, lane_bands()[1]).result == "marked"


def test_the_commands_say_what_they_did(cgroup: Path) -> None:
    sleeper = subprocess.Popen(cgrouptree.inside(cgroup, "sleep", "60"))
    cgrouptree.eventually(lambda: cgroups.populated(cgroup), "somebody is inside")
    on = ["--cgroup", str(cgroup)]
    said = RUNNER.invoke(app, ["mark", *on, "--lane", "1"]).stdout
    assert said.splitlines()[0] == f"{cgroup}: marked (lane 1)"
    assert "1 process " in said.splitlines()[1]
    (found,) = json.loads(RUNNER.invoke(app, ["marks", "--json"]).stdout)
    assert found == mine(cgroup)[0].as_dict()
    assert found["processes"] == 1
    assert str(cgroup) in RUNNER.invoke(app, ["marks"]).stdout
    dry = RUNNER.invoke(app, ["unmark", *on, "--dry-run"]).stdout
    assert "dry run" in dry
    done = json.loads(RUNNER.invoke(app, ["unmark", *on, "--json"]).stdout)
    assert done == {
        "cgroup": str(cgroup),
        "result": "unmarked",
        "lane": 1,
        "processes": 1,
        "dry_run": False,
    }
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--cgroup", "/", "--lane", "1"], "top of the tree"),
        (["--cgroup", "/no/such", "--lane", "1"], "no cgroup"),
        (["--cgroup", "/etc", "--lane", "1"], "version 2"),
        (["--cgroup", "CGROUP", "--lane", "1", "--dscps", "1,2"], "6 distinct DSCPs"),
    ],
)
def test_bad_input_changes_nothing(cgroup: Path, argv: list[str], said: str) -> None:
    argv = [str(cgroup) if word == "CGROUP" else word for word in argv]
    error = RUNNER.invoke(app, ["mark", *argv]).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)
    assert mine(cgroup) == []


def test_a_name_of_any_bytes_is_shown_and_hides_no_other(netns_pair: Pair, cgroup: Path) -> None:
    odd = cgroup / os.fsdecode(b"odd\xff\r\x1b[2K")
    odd.mkdir()
    strict = ("env", "PYTHONIOENCODING=utf-8:strict")  # as in a locale such as en_US.UTF-8
    on = ("--cgroup", str(odd))
    shown = rf"{cgroup}/odd\udcff\r\x1b[2K: marked (lane 1)"
    said = tlsched(netns_pair.a, "mark", *on, "--lane", "1", prefix=strict).stdout
    assert said.splitlines()[0] == shown
    shown = shown.split(": ")[0]
    assert shown in tlsched(netns_pair.a, "marks", prefix=strict).stdout
    assert shown in tlsched(netns_pair.a, "unmark", *on, prefix=strict).stdout


def test_too_little_address_space_is_said_and_not_aborted(netns_pair: Pair, cgroup: Path) -> None:
    little = ("prlimit", f"--as={300 << 20}")
    argv = ("mark", "--cgroup", str(cgroup), "--lane", "1")
    assert "RLIMIT_AS" in tlsched(netns_pair.a, *argv, code=2, prefix=little).stderr
    assert mine(cgroup) == []


def test_a_missing_capability_is_named(netns_pair: Pair, cgroup: Path) -> None:
    keep = ("setpriv", "--bounding-set", "-all,+net_admin", "--inh-caps", "-all")
    for argv in (["mark", "--cgroup", str(cgroup), "--lane", "1"], ["run", "--lane=1", "true"]):
        said = tlsched(netns_pair.a, *argv, code=2, prefix=keep).stderr
        assert "CAP_BPF and CAP_NET_ADMIN" in said


def mine(cgroup: Path) -> list[Marking]:
    return [each for each in marking.markings() if each.cgroup == str(cgroup)]
