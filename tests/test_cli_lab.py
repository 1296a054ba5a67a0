"""`tlsched lab` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

TLSCHED = [sys.executable, "-c", "from tlsched.cli import main; main()"]


def tlsched(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TLSCHED, *argv], capture_output=True, text=True, timeout=60)


@pytest.fixture
def name() -> Iterator[str]:
    label = f"cli{os.getpid()}"
    yield label
    tlsched("lab", "down", "--name", label)
    assert not list(Path("/run/netns").glob(f"tlsched-{label}-*"))


def test_up_exec_status_down(name: str) -> None:
    option = ("--name", name)
    done = tlsched("lab", "up", "--hosts", "2", "--rate", "100mbit", "--json", *option)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["outcome"] == "up"
    assert shown["rate_bps"] == 100_000_000
    assert [host["name"] for host in shown["hosts"]] == ["h0", "h1"]

    again = tlsched("lab", "up", "--hosts", "2", "--rate", "100mbit", *option)
    assert again.returncode == 0
    assert "unchanged" in again.stdout
    other = tlsched("lab", "up", "--hosts", "3", *option)
    assert other.returncode == 1
    assert "is up with 2 hosts" in other.stderr

    inside = tlsched("lab", "exec", *option, "h1", "--", "ip", "-json", "address", "show", "eth0")
    addresses = {entry["local"] for entry in json.loads(inside.stdout)[0]["addr_info"]}
    assert {shown["hosts"][1]["ipv4"], shown["hosts"][1]["ipv6"]} <= addresses

    labs = {lab["name"]: lab for lab in json.loads(tlsched("lab", "status", "--json").stdout)}
    assert labs[name]["state"] == "up"
    assert labs[name]["owner_pid"] is None
    assert name in tlsched("lab", "status").stdout

    assert tlsched("lab", "down", *option).returncode == 0
    gone = tlsched("lab", "down", *option)
    assert gone.returncode == 0
    assert "nothing to remove" in gone.stdout


def test_exec_passes_options_exit_codes_and_signals_through(name: str) -> None:
    assert tlsched("lab", "up", "--hosts", "1", "--name", name).returncode == 0
    run = ("lab", "exec", "--name", name, "h0", "--")
    assert tlsched(*run, "sh", "-c", "exit 7").returncode == 7
    assert tlsched(*run, "echo", "--json", "--", "-x").stdout == "--json -- -x\n"
    missing = tlsched(*run, "no-such-program")
    assert missing.returncode == 127
    assert missing.stderr.startswith("error: there is no command no-such-program;")
    refused = tlsched(*run, __file__)
    assert refused.returncode == 126
    assert "may not be run" in refused.stderr
    catch = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [*TLSCHED, *run, "sh", "-c", catch], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "caught\n"
    assert process.returncode == 5


def test_a_lab_that_lost_a_namespace_is_called_broken(name: str) -> None:
    option = ("--name", name)
    assert tlsched("lab", "up", "--hosts", "2", *option).returncode == 0
    subprocess.run(["ip", "netns", "delete", f"tlsched-{name}-h1"], check=True)
    labs = {lab["name"]: lab for lab in json.loads(tlsched("lab", "status", "--json").stdout)}
    assert labs[name]["state"] == "broken"
    again = tlsched("lab", "up", "--hosts", "2", *option)
    assert again.returncode == 1
    assert "lab down" in again.stderr
    assert tlsched("lab", "down", *option).returncode == 0
    assert tlsched("lab", "up", "--hosts", "2", *option).returncode == 0


def test_a_lab_whose_builder_was_killed_is_broken_and_built_anew(name: str) -> None:
    argv = ("lab", "up", "--hosts", "8", "--name", name)
    last = Path(f"/run/netns/tlsched-{name}-h7")
    builder = subprocess.Popen([*TLSCHED, *argv], stdout=subprocess.DEVNULL)
    while not last.exists():
        assert builder.poll() is None
    builder.kill()
    builder.wait()
    labs = {lab["name"]: lab for lab in json.loads(tlsched("lab", "status", "--json").stdout)}
    assert labs[name]["state"] == "broken"
    again = tlsched(*argv, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["outcome"] == "up"
    whole = tlsched(
        "lab", "exec", "--name", name, "h7", "--", "ip", "-4", "address", "show", "eth0"
    )
    assert "inet 198.18.0.8" in whole.stdout


def test_two_builders_at_once_end_as_one_after_the_other(name: str) -> None:
    argv = [*TLSCHED, "lab", "up", "--hosts", "4", "--json", "--name", name]
    pair = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outcomes = [json.loads(process.communicate(timeout=60)[0])["outcome"] for process in pair]
    assert sorted(outcomes) == ["unchanged", "up"]
    assert [process.returncode for process in pair] == [0, 0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("up", "--rate", "fast"), "fast"),
        (("up", "--hosts", "0"), "0 hosts"),
        (("up", "--name", "../x"), "cannot name a lab"),
    ],
)
def test_bad_input_is_one_clear_line(argv: tuple[str, ...], said: str) -> None:
    done = tlsched("lab", *argv)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_unknown_host_or_lab_is_named(name: str) -> None:
    missing = tlsched("lab", "exec", "--name", name, "h0", "--", "true")
    assert missing.returncode == 2
    assert "no lab called" in missing.stderr
    assert tlsched("lab", "up", "--hosts", "1", "--name", name).returncode == 0
    unknown = tlsched("lab", "exec", "--name", name, "h4", "--", "true")
    assert unknown.returncode == 2
    assert "it has h0" in unknown.stderr
