"""`tlsched top`: rates, backlogs and the lanes' sockets of a link that carries traffic."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import pytest

from tests.kernel.hostcli import TLSCHED, attach, detach, tlsched
from tests.netns import Pair
from tests.tc.traffic import mark
from tlsched import livetraffic, sockdiag
from tlsched.bands import Band, all_bands, lane_bands
from tlsched.linkstatus import BandStatus, LinkStatus

root = pytest.mark.root
LANES = lane_bands()
NAMES = {(band.priority, band.dscp): band.name for band in LANES}
STUCK_BYTES = 300_000


@contextmanager
def stuck(pair: Pair, band: Band | None, host: str) -> Iterator[socket.socket]:
    """A marked connection from a to b whose reader reads nothing, full of unsent bytes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with pair.b.call(socket.create_server, ("", 0), family=family, dualstack_ipv6=False) as server:
        sock = pair.a.call(socket.socket, family)
        with sock:
            mark(sock, band)
            if family == socket.AF_INET6 and band is not None:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, band.tos or 0)
            sock.connect((host, server.getsockname()[1]))
            sock.setblocking(False)
            for _ in range(5):  # full, and full again after the peer's window has grown
                with contextlib.suppress(BlockingIOError):
                    while True:
                        sock.send(bytes(65536))
                time.sleep(0.05)
            yield sock


def _sockets(pair: Pair) -> list[sockdiag.LaneSocket]:
    return pair.a.call(sockdiag.lane_sockets, NAMES)


def _name(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@pytest.mark.stock_kernel
@root
@pytest.mark.parametrize("version", ["v4", "v6"])
@pytest.mark.lengthy
def test_a_lanes_socket_is_found_with_what_waits_in_it(netns_pair: Pair, version: str) -> None:
    host = netns_pair.b.v4 if version == "v4" else netns_pair.b.v6
    with stuck(netns_pair, LANES[1], host) as sock, stuck(netns_pair, None, host):
        (found,) = _sockets(netns_pair)
        assert (found.lane, found.local) == ("lane1", _name(sock))
        assert found.unsent_bytes >= STUCK_BYTES


@root
def test_a_v6_socket_to_a_v4_peer_goes_by_its_tos(netns_pair: Pair) -> None:
    a, b = netns_pair.a, netns_pair.b
    with b.call(socket.create_server, (b.v4, 0)) as server:
        sock = a.call(socket.socket, socket.AF_INET6)
        with sock:
            mark(sock, LANES[0])
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 0)
            sock.connect((f"::ffff:{b.v4}", server.getsockname()[1]))
            (found,) = _sockets(netns_pair)
            assert (found.lane, found.local) == ("lane0", _name(sock))


@root
def test_one_mark_alone_is_no_lanes_socket(netns_pair: Pair) -> None:
    a, b = netns_pair.a, netns_pair.b
    with b.call(socket.create_server, (b.v4, 0)) as server:
        sock = a.call(socket.socket)
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 6)
            sock.connect(server.getsockname())
            assert _sockets(netns_pair) == []


@root
def test_top_shows_rates_and_sockets_as_json(netns_pair: Pair) -> None:
    attach(netns_pair.a, netns_pair.a.dev, "20mbit")
    with stuck(netns_pair, LANES[1], netns_pair.b.v4) as sock:
        sender = _keep_sending(netns_pair, LANES[3])
        try:
            shown = tlsched(netns_pair.a, "top", "--json", "--count", "2").stdout.splitlines()
        finally:
            sender.kill()
            sender.join()
        assert len(shown) == 2
        last = json.loads(shown[-1])
        (link,) = last["links"]
        assert (link["iface"], link["state"], link["rate_bps"]) == ("eth0", "attached", 20_000_000)
        bands = {band["name"]: band for band in link["bands"]}
        assert list(bands) == [band.name for band in all_bands()]
        assert bands["lane3"]["rate_bps"] > 10_000_000
        assert bands["lane3"]["packets_per_s"] > 100
        assert bands["lane0"]["rate_bps"] == 0
        assert _name(sock) in [item["local"] for item in last["sockets"] if item["lane"] == "lane1"]


def _keep_sending(pair: Pair, band: Band) -> BaseProcess:
    """Datagrams of a lane, faster than the link, for at most 20 s."""

    def send() -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        mark(sock, band)
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            for _ in range(50):
                sock.sendto(bytes(1200), (pair.b.v4, 9))
            time.sleep(0.01)

    return pair.a.spawn(send)


@root
def test_top_once_into_a_pipe_is_one_plain_table(netns_pair: Pair) -> None:
    attach(netns_pair.a, netns_pair.a.dev)
    with stuck(netns_pair, LANES[0], netns_pair.b.v6) as sock:
        said = tlsched(netns_pair.a, "top", "--once", "--interval", "0.1").stdout
        assert _name(sock) in said
    assert said.count("eth0: attached, 1gbit") == 1
    assert "\x1b" not in said
    assert all(band.name in said for band in all_bands())


@root
def test_top_without_anything_attached_says_so(netns_pair: Pair) -> None:
    said = tlsched(netns_pair.a, "top", "--once", "--interval", "0.1").stdout
    assert "no interface is attached" in said
    assert "no socket carries a lane's marks" in said


@root
def test_bad_settings_are_refused(netns_pair: Pair) -> None:
    assert "interval" in tlsched(netns_pair.a, "top", "--interval", "0", code=2).stderr
    assert "--count 0" in tlsched(netns_pair.a, "top", "--count", "0", code=2).stderr
    assert "no interface" in tlsched(netns_pair.a, "top", "--iface", "nope", code=2).stderr


@root
def test_top_follows_an_interface_that_is_detached_meanwhile(netns_pair: Pair) -> None:
    a = netns_pair.a
    attach(a, a.dev)
    argv = ["top", "--json", "--interval", "0.3", "--iface", a.dev]
    process = a.popen(*TLSCHED, *argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["links"][0]["state"] == "attached"
        detach(a, a.dev)
        states = {json.loads(process.stdout.readline())["links"][0]["state"] for _ in range(2)}
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert "detached" in states


@root
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_on_a_terminal_it_is_live_and_leaves_it_as_it_was(
    netns_pair: Pair, number: signal.Signals, code: int
) -> None:
    a = netns_pair.a
    attach(a, a.dev)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    argv = [*TLSCHED, "top", "--interval", "0.2"]
    with a.popen(*argv, env=environment, **streams) as process:
        os.close(theirs)
        said = _read_until(ours, b"lane5")
        process.send_signal(number)
        said += _read_until(ours, None)
        assert process.wait(20) == code
    os.close(ours)
    assert b"\x1b[?1049h" in said  # the alternate screen, and the cursor hidden
    assert said.rindex(b"\x1b[?1049l") > said.rindex(b"\x1b[?1049h")
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")
    assert b"Traceback" not in said


def _read_until(fd: int, wanted: bytes | None) -> bytes:
    """What the terminal shows until ``wanted`` comes, or until its last writer has gone."""
    said, deadline_s = b"", time.monotonic() + 20
    while time.monotonic() < deadline_s and (wanted is None or wanted not in said):
        if select.select([fd], [], [], 0.5)[0]:
            try:
                said += os.read(fd, 65536)
            except OSError:  # EIO: nobody holds the other end
                break
    return said


def _reading(at_s: float, size: int, drops: int) -> livetraffic.Reading:
    band = BandStatus("lane0", 6, 40, size // 100, size, 7, drops)
    link = LinkStatus("eth0", "attached", 10**9, "htb", "bpf", (band,))
    return livetraffic.Reading(at_s, (link,), ())


def test_rates_are_differences_over_time() -> None:
    traffic = livetraffic.between(_reading(1.0, 1000, 1), _reading(3.0, 5000, 5))
    (band,) = traffic.links[0].bands
    assert (traffic.interval_s, band.rate_bps, band.packets_per_s) == (2.0, 16000, 20)
    assert (band.drops_per_s, band.drops, band.backlog_bytes) == (2, 5, 7)


def test_counters_that_started_anew_give_no_negative_rate() -> None:
    (band,) = livetraffic.between(_reading(1.0, 5000, 5), _reading(2.0, 1000, 0)).links[0].bands
    assert (band.rate_bps, band.drops_per_s) == (8000, 0)


def test_a_link_that_is_new_starts_at_zero() -> None:
    (band,) = (
        livetraffic.between(livetraffic.Reading(1.0, (), ()), _reading(2.0, 5000, 5)).links[0].bands
    )
    assert (band.rate_bps, band.drops_per_s) == (0, 0)
