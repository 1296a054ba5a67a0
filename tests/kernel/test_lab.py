"""A lab is built, used and removed without a trace, whatever happens to its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tlsched.errors import ConfigError, FeatureMissing, LabError
from tlsched.lab import Lab, namespaces, remove_orphans, state

pytestmark = pytest.mark.root

GBIT = 1_000_000_000
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
HOLD = """
import subprocess, sys, time
from tlsched.lab import Lab
lab = Lab(2, 10**9, sys.argv[1]).up()
print(lab.popen(0, ["sleep", "60"], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(60)
"""


def traces(name: str) -> list[str]:
    """What is left of a lab: namespaces and its file."""
    left = [path.name for path in namespaces.NETNS_DIR.glob(f"tlsched-{name}-*")]
    return left + [path.name for path in state.STATE_DIR.glob(f"{name}.json")]


def soon(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


def running(pid: int) -> bool:
    """A zombie does not run: here nobody may reap what a killed process had started."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def name() -> str:
    return f"t{os.getpid()}"


@pytest.fixture
def killed_owner(name: str) -> Iterator[tuple[str, int]]:
    """The name of a lab whose owner was killed by SIGKILL, and the pid of what runs in it."""
    lost = f"{name}-lost"
    owner = subprocess.Popen([sys.executable, "-c", HOLD, lost], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        inside = int(owner.stdout.readline())
    finally:
        owner.kill()
        owner.wait()
    yield lost, inside
    remove_orphans()


def test_hosts_reach_one_another_over_both_families(name: str) -> None:
    with Lab(hosts=3, rate_bps=GBIT, name=name) as lab:
        for address in (lab.hosts[2].ipv4, lab.hosts[2].ipv6):
            listen = f"import socket; s = socket.create_server(('{address}', 7000), "
            listen += f"family=socket.AF_INET{6 if ':' in address else ''}); print(1, flush=True); "
            server = lab.popen(
                2, [sys.executable, "-c", listen + "s.accept()"], stdout=subprocess.PIPE
            )
            assert server.stdout is not None
            server.stdout.readline()  # it listens
            call = f"import socket; socket.create_connection(('{address}', 7000), 5)"
            assert lab.run(0, [sys.executable, "-c", call]).returncode == 0
            assert server.wait(10) == 0
            server.stdout.close()
    assert traces(name) == []


def test_a_process_of_a_host_keeps_mounts_pid_and_exit_code(name: str) -> None:
    with Lab(2, GBIT, name) as lab:
        shown = lab.run(1, ["readlink", "/proc/self/ns/mnt"], capture_output=True, text=True)
        assert shown.stdout.strip() == os.readlink("/proc/self/ns/mnt")
        process = lab.popen(1, ["sh", "-c", "echo $$; exit 7"], stdout=subprocess.PIPE, text=True)
        assert process.communicate(timeout=10)[0].strip() == str(process.pid)
        assert process.returncode == 7
        network = Path("/proc/self/ns/net").stat().st_ino
        assert lab.run(1, ["test", "/proc/self/ns/net", "-ef", "/proc/1/ns/net"]).returncode == 1
        assert Path("/proc/self/ns/net").stat().st_ino == network


def test_down_ends_what_runs_inside_also_what_ignores_sigterm(name: str) -> None:
    stubborn = "trap '' TERM; echo ready; while :; do sleep 1; done"
    lab = Lab(2, GBIT, name).up()
    try:
        process = lab.popen(0, ["sh", "-c", stubborn], stdout=subprocess.PIPE)
        orphan = lab.run(
            1, ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        assert set(lab.processes()) >= {process.pid, int(orphan.stdout)}
    finally:
        lab.down()
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()
    assert not running(int(orphan.stdout))
    assert traces(name) == []
    lab.down()  # nothing to do, and no error


def test_the_machine_is_as_before(name: str) -> None:
    def links() -> str:
        return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout

    allowed, shown = ALLOWED.read_text(), links()
    with Lab(2, GBIT, name) as lab:
        assert links() == shown
        assert "cubic" in ALLOWED.read_text().split()
        sysctls = lab.describe()["hosts"][0]["sysctls"]
        assert sysctls["net.ipv4.tcp_congestion_control"] == "cubic"
    assert links() == shown
    if not state.records():  # another user's lab still needs it
        assert sorted(ALLOWED.read_text().split()) == sorted(allowed.split())


def test_the_next_lab_removes_what_a_killed_owner_left(
    name: str, killed_owner: tuple[str, int]
) -> None:
    lost, inside = killed_owner
    with Lab(1, GBIT, name):  # another user of the machine may have been faster: no matter
        assert traces(lost) == []
        assert not running(inside)


def test_an_owner_killed_at_any_moment_of_building_leaves_nothing_to_the_next(name: str) -> None:
    lost = f"{name}-walk"
    build = f"from tlsched.lab import Lab\nprint(1, flush=True)\nLab(4, 10**9, '{lost}').up()\n"
    for step in range(12):
        owner = subprocess.Popen(
            [sys.executable, "-c", build + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert owner.stdout is not None
        owner.stdout.readline()
        time.sleep(step * 0.007)  # building takes about 0.05 s
        owner.kill()
        owner.communicate()
        remove_orphans()
        assert traces(lost) == []


def test_a_living_owner_is_left_alone(name: str) -> None:
    held = f"{name}-held"
    owner = subprocess.Popen([sys.executable, "-c", HOLD, held], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        inside = int(owner.stdout.readline())
        with Lab(1, GBIT, name):
            pass
        assert held not in remove_orphans()
        with pytest.raises(LabError, match=f"process {owner.pid}"):
            Lab.open(held).down()
        assert running(inside)
        assert Lab.open(held).complete()
    finally:
        owner.kill()
        owner.communicate()
        remove_orphans()
    assert traces(held) == []


def test_a_reused_pid_is_not_the_owner() -> None:
    current = state.Owner.current()
    assert current.alive()
    assert not state.Owner(current.pid, current.start_ticks - 1).alive()


def test_two_labs_do_not_see_each_other(name: str) -> None:
    with Lab(2, GBIT, f"{name}-a") as first, Lab(2, GBIT, f"{name}-b") as second:
        server = "import socket, time; s = socket.create_server(('198.18.0.2', 7000)); "
        process = first.popen(
            1,
            [sys.executable, "-c", server + "print(1, flush=True); time.sleep(60)"],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        call = "import socket; socket.create_connection(('198.18.0.2', 7000), 2)"
        refused = second.run(0, [sys.executable, "-c", call], stderr=subprocess.DEVNULL)
        assert refused.returncode == 1  # same address, other network
        second.down()
        assert first.complete()
        assert first.run(0, [sys.executable, "-c", call]).returncode == 0
        process.stdout.close()


def test_an_existing_name_and_a_strangers_namespace_are_refused(name: str) -> None:
    with Lab(1, GBIT, name) as lab:
        with pytest.raises(LabError, match="up already"):
            Lab(1, GBIT, name).up()
        assert lab.complete()
    stranger = f"tlsched-{name}-h0"
    subprocess.run(["ip", "netns", "add", stranger], check=True)
    try:
        with pytest.raises(LabError, match="belongs to no lab"):
            Lab(1, GBIT, name).up()
        assert traces(name) == [stranger]
    finally:
        subprocess.run(["ip", "netns", "delete", stranger], check=True)


def test_a_failure_half_way_leaves_nothing_and_names_what_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "tc"
    failing.write_text(
        "#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\n"
        "echo 'Command failed -:1' >&2\nexit 1\n"
    )
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(FeatureMissing, match="no htb"):
        Lab(2, GBIT, name).up()
    assert traces(name) == []


def test_without_privilege_nothing_is_begun(name: str) -> None:
    attempt = (
        "import os, tlsched.lab.cluster as c\nos.setuid(65534)\n"
        f"try: c.Lab(1, 10**9, '{name}').up()\nexcept Exception as e: print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True)
    assert done.stdout.startswith("PermissionMissing")
    assert "CAP_NET_ADMIN" in done.stdout
    assert traces(name) == []


@pytest.mark.parametrize(
    ("hosts", "rate_bps", "label"),
    [(0, GBIT, "a"), (65, GBIT, "a"), (2, 1, "a"), (2, GBIT, "../x")],
)
def test_impossible_labs_are_refused(hosts: int, rate_bps: int, label: str) -> None:
    with pytest.raises(ConfigError):
        Lab(hosts, rate_bps, label)


def test_eight_hosts_are_up_in_seconds(name: str) -> None:
    start_s = time.monotonic()
    with Lab(8, GBIT, name) as lab:
        assert time.monotonic() - start_s < 4  # measured: 0.1
        with pytest.raises(ConfigError, match="no host 8"):
            lab.popen(8, ["true"])
    assert soon(lambda: traces(name) == [])
