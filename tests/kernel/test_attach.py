"""attach, detach and status through the command line, in a real kernel."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests import netns
from tests.kernel.hostcli import attach, detach, snapshot, state, status, tlsched, tlsched_json
from tests.netns import Namespace, Pair
from tlsched import control
from tlsched.bands import DEFAULT_DSCPS, all_bands
from tlsched.config import parse_rate
from tlsched.tc.kernel import Kernel

pytestmark = pytest.mark.root


def test_attach_status_detach(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    assert tlsched_json(host, "status", code=3) == []
    assert tlsched_json(host, "status", "--iface", dev, code=3)[0]["state"] == "detached"

    attach(host, dev)
    (link,) = tlsched_json(host, "status")
    keys = ["iface", "state", "rate_bps", "qdisc", "classifier", "bands"]
    keys += ["drift", "default_share", "trust", "refused", "notes", "unclassified_share"]
    assert list(link) == keys
    assert (link["iface"], link["state"]) == (dev, "attached")
    assert (link["rate_bps"], link["qdisc"], link["classifier"]) == (10**9, "htb", "bpf")
    marks = [(band["name"], band["priority"], band["dscp"]) for band in link["bands"]]
    assert marks == [(band.name, band.priority, band.dscp) for band in all_bands()]
    keys = ["name", "priority", "dscp", "packets", "bytes", "backlog_bytes", "drops"]
    assert all(list(band) == keys for band in link["bands"])

    assert tlsched_json(host, "detach", "--iface", dev)["result"] == "detached"
    assert snapshot(host, dev) == before
    assert tlsched_json(host, "detach", "--iface", dev)["result"] == "unchanged"


def test_attaching_twice_changes_nothing_and_other_settings_change_in_place(
    netns_pair: Pair,
) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    before = snapshot(host, dev)
    again = tlsched_json(host, "attach", "--iface", dev, "--rate", "1000mbit")
    assert (again["result"], again["changes"]) == ("unchanged", [])
    assert snapshot(host, dev) == before
    other = tlsched_json(host, "attach", "--iface", dev, "--rate", "2gbit", "--share", "0.1")
    assert other["result"] == "changed"
    assert all(line.startswith("change ") for line in other["changes"])
    (link,) = tlsched_json(host, "status")
    assert (link["state"], link["rate_bps"]) == ("attached", 2 * 10**9)


@pytest.mark.parametrize("limit", [8, 12, 20])
def test_too_few_open_files_are_named_and_nothing_is_changed(netns_pair: Pair, limit: int) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    limited = ("prlimit", f"--nofile={limit}", "--")
    done = tlsched(host, "attach", "--iface", dev, "--rate", "1gbit", code=2, prefix=limited)
    assert f"more open files than the {limit} of its limit" in done.stderr
    assert "ulimit -n" in done.stderr
    assert snapshot(host, dev) == before


def test_a_dry_run_prints_what_is_applied_then(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    for command in (
        ["attach", "--iface", dev, "--rate", "1gbit"],
        ["attach", "--iface", dev, "--rate", "2gbit"],
        ["detach", "--iface", dev],
    ):
        before = snapshot(host, dev)
        dry = tlsched_json(host, *command, "--dry-run")
        assert snapshot(host, dev) == before
        done = tlsched_json(host, *command)
        assert dry["changes"] == done["changes"]
        assert dry["changes"]
        assert (dry["dry_run"], done["dry_run"]) == (True, False)
        assert dry["result"] == done["result"]


def test_high_rates_read_back_right(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    for rate in ("34gbit", "35gbit", "100gbit", "400gbit", "1tbit"):
        attach(host, dev, rate)
        (link,) = status(host)
        assert (link.state, link.rate_bps) == ("attached", parse_rate(rate))
        shown = host.run("tc", "class", "show", "dev", dev, "classid", "7150:1").stdout
        assert f"rate {rate.replace('gbit', 'Gbit').replace('tbit', 'Tbit')} " in shown


@pytest.mark.parametrize("dev", ["eth0.100", "a.b.c", "x" * 15, "wan-1_@"])
def test_any_legal_interface_name(make_netns: Callable[[], Namespace], dev: str) -> None:
    host = make_netns()
    host.run("ip", "link", "add", dev, "type", "veth", "peer", "name", "peer0")
    host.run("ip", "link", "set", dev, "mtu", "9000", "up")
    before = snapshot(host, dev)
    attach(host, dev)
    assert status(host)[0].iface == dev
    detach(host, dev)
    assert snapshot(host, dev) == before


def test_several_interfaces(make_netns: Callable[[], Namespace]) -> None:
    host = make_netns()
    for dev, peer in (("a0", "a1"), ("b0", "b1")):
        host.run("ip", "link", "add", dev, "type", "veth", "peer", "name", peer)
        attach(host, dev)
    host.run("tc", "class", "change", "dev", "b0", "classid", "7150:1", "htb", "rate", "5mbit")
    states = {link["iface"]: link["state"] for link in tlsched_json(host, "status", code=4)}
    assert states == {"a0": "attached", "b0": "drifted"}


def test_bad_input_is_one_line_and_changes_nothing(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    for argv, words in (
        (["attach", "--iface", "nope", "--rate", "1gbit"], 'no interface "nope"'),
        (["attach", "--iface", dev, "--rate", "fast"], "not understood"),
        (["attach", "--iface", dev, "--rate", "1gbit", "--share", "2"], "out of range"),
    ):
        assert words in tlsched(host, *argv, code=2).stderr
    assert snapshot(host, dev) == before


@pytest.mark.parametrize("command", ["attach", "detach"])
def test_a_missing_capability_is_named(netns_pair: Pair, command: str) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    if command == "detach":
        attach(host, dev)
    before = snapshot(host, dev)
    rate = ["--rate", "1gbit"] if command == "attach" else []
    drop = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", "--")
    done = tlsched(host, command, "--iface", dev, *rate, code=2, prefix=drop)
    assert "CAP_NET_ADMIN" in done.stderr
    assert snapshot(host, dev) == before


def test_whoever_has_no_capability_is_told_what_is_missing(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    # Not another uid: it might be unable to read the folder that this lies in.
    user = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--")
    done = tlsched(host, "attach", "--iface", dev, "--rate", "1gbit", code=2, prefix=user)
    assert "CAP_" in done.stderr
    attach(host, dev)
    assert "CAP_" in tlsched(host, "status", code=2, prefix=user).stderr


def test_an_interface_that_was_made_again_is_detached(make_netns: Callable[[], Namespace]) -> None:
    host = make_netns()
    make = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "peer0"]
    host.run(*make)
    attach(host, "eth0")
    host.run("ip", "link", "delete", "eth0")
    assert status(host) == []
    host.run(*make)
    assert state(host, "eth0") == "detached"
    attach(host, "eth0")
    assert state(host, "eth0") == "attached"


def test_nothing_stays_running(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    tlsched(host, "attach", "--iface", dev, "--rate", "1gbit")
    assert netns.run("ip", "netns", "pids", host.name).stdout == ""
    tlsched(host, "attach", "--iface", dev, "--rate", "2gbit")
    programs = netns.run("bpftool", "prog", "show").stdout
    shown = host.run("tc", "filter", "show", "dev", dev, "egress").stdout
    program_id = shown.split(" id ")[1].split()[0]
    assert f"\n{program_id}: " in f"\n{programs}"
    tlsched(host, "detach", "--iface", dev)
    deadline_s = time.monotonic() + 5  # the kernel frees it after a grace period (RCU)
    while netns.run("bpftool", "prog", "show", "id", program_id, check=False).returncode == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_no_quantum_warning_in_the_kernels_log(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev

    def warnings() -> list[str]:
        return [line for line in netns.run("dmesg").stdout.splitlines() if "quantum" in line]

    before = warnings()
    for rate in ("10mbit", "100mbit", "1gbit", "10gbit", "400gbit"):
        attach(host, dev, rate)
        detach(host, dev)
    assert warnings() == before


def test_other_code_points_are_attached_and_changed_in_place(netns_pair: Pair) -> None:
    a = netns_pair.a
    theirs = (46, 32, 24, 16, 12, 8)
    attach_with = ("attach", "--iface", a.dev, "--rate", "1gbit", "--dscps", "46,32,24,16,12,8")
    assert tlsched_json(a, *attach_with)["result"] == "attached"
    assert tlsched_json(a, *attach_with)["result"] == "unchanged"
    (link,) = tlsched_json(a, "status", "--iface", a.dev)
    assert [band["dscp"] for band in link["bands"]] == [*theirs, None]
    assert link["state"] == "attached"
    back = tlsched_json(a, "attach", "--iface", a.dev, "--rate", "1gbit")
    assert back["result"] == "changed"
    (link,) = tlsched_json(a, "status", "--iface", a.dev)
    assert [band["dscp"] for band in link["bands"]] == [*DEFAULT_DSCPS, None]
    for bad in ("40", "40,32,24,16,12,forty", "48,32,24,16,12,8", "40,32,24,16,10,8"):
        tlsched(a, "attach", "--iface", a.dev, "--rate", "1gbit", "--dscps", bad, code=2)


def test_status_passes_over_an_interface_that_vanishes(
    netns_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's veth may go between being listed and being read."""
    a = netns_pair.a
    attach(a, a.dev)
    listed = Kernel.interfaces
    monkeypatch.setattr(Kernel, "interfaces", lambda self: ["gone0", *listed(self)])
    assert [link.iface for link in a.call(control.status)] == [a.dev]
