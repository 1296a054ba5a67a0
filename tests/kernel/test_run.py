"""`tlsched run` as a process: what the command notices of it, and what is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cgrouptree
from tests.kernel.hostcli import TLSCHED
from tlsched import cgroups, marking
from tlsched.bands import lane_bands
from tlsched.ebpf import tag

pytestmark = pytest.mark.root


@pytest.fixture
def parent() -> Iterator[Path]:
    """The cgroup in which the test starts its runs."""
    with cgrouptree.cgroup() as path:
        yield path


def argv_of(parent: Path, *command: str, lane: int = 2) -> list[str]:
    return cgrouptree.inside(parent, *TLSCHED, "run", "--lane", str(lane), "--", *command)


def run(parent: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    argv = argv_of(parent, *command)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done


def start(parent: Path, *command: str) -> subprocess.Popen[str]:
    """A run whose command prints a line when it has started; this waits for the line."""
    script = 'echo started; exec "$@"'
    argv = argv_of(parent, "sh", "-c", script, "sh", *command)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def runs_in(parent: Path) -> list[Path]:
    # os.walk() passes over what is removed meanwhile, which rglob() does not.
    return sorted(
        Path(folder, name)
        for folder, names, _ in os.walk(parent)
        for name in names
        if name.startswith("tlsched-run-")
    )


def nothing_is_left(parent: Path) -> None:
    cgrouptree.eventually(lambda: runs_in(parent) == [], "the run's cgroup is removed")


def sweeper_of(cgroup: Path) -> int:
    """The process that will remove the cgroup: its command line ends with the folder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(b"sweep.py") for word in words) and bytes(cgroup) in words:
                return int(entry.name)
    raise AssertionError(f"nobody waits for {cgroup}")


def test_the_command_notices_nothing(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same pid, no child, standard files, descriptors, environment, signals; it is in the lane."""
    monkeypatch.setenv("TLSCHED_TEST", "kept")
    script = """
import os, sys
print(os.getpid(), os.getppid(), os.getcwd(), sys.stdin.read(), os.environ["TLSCHED_TEST"])
print(open(f"/proc/self/task/{os.getpid()}/children").read().split())
print(sorted(os.listdir("/proc/self/fd"))[:-1])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("SigB", "SigI"))])
print([name for name in os.environ if "BCC" in name], open("/proc/self/cgroup").read())
"""
    argv = argv_of(parent, sys.executable, "-c", script)
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate("input", timeout=60)
    assert (process.returncode, err) == (0, "")
    identity, children, fds, signals, *rest = out.splitlines()
    assert identity == f"{process.pid} {os.getpid()} {Path.cwd()} input kept"
    assert children == "[]"
    assert fds == "['0', '1', '2']"
    plain = [sys.executable, "-c", "print(open('/proc/self/status').read())"]
    directly = subprocess.run(plain, capture_output=True, text=True, check=True)
    assert eval(signals) == [
        line.split()[1]
        for line in directly.stdout.splitlines()
        if line.startswith(("SigB", "SigI"))
    ]
    assert rest[0].startswith("[] ")
    assert f"0::/{parent.name}/tlsched-run-{process.pid}" in [rest[0][3:], *rest[1:]]
    nothing_is_left(parent)


def test_sigpipe_ends_the_command_as_ever(parent: Path) -> None:
    argv = argv_of(parent, "sh", "-c", "grep SigIgn /proc/self/status")
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout
    assert int(said.split()[1], 16) & (1 << signal.SIGPIPE - 1) == 0


def test_nohup_holds(parent: Path) -> None:
    argv = ["nohup", *argv_of(parent, "grep", "SigIgn", "/proc/self/status")]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout
    assert int(said.split()[1], 16) & (1 << signal.SIGHUP - 1)


def test_closed_descriptors_stay_closed(parent: Path) -> None:
    argv = argv_of(parent, "sh", "-c", "test -e /proc/self/fd/1 && exit 3; exit 4")
    for closing in (">&-", "<&- >&- 2>&-"):
        done = subprocess.run(["sh", "-c", f'exec "$@" {closing}', "sh", *argv], timeout=60)
        assert done.returncode == 4
    nothing_is_left(parent)


def test_a_folder_that_is_gone_is_said(parent: Path, tmp_path: Path) -> None:
    argv = argv_of(parent, "true")
    script = f'cd "{tmp_path}" && rmdir "{tmp_path}" && exec "$@"'
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        ["sh", "-c", script, "sh", *argv], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.returncode == 2
    assert "current folder is gone" in done.stderr
    nothing_is_left(parent)


def test_exit_codes_are_the_commands(parent: Path, tmp_path: Path) -> None:
    odd, orphaned = tmp_path / "odd", tmp_path / "orphaned"
    odd.write_bytes(b"\0no program")
    orphaned.write_text("#!/no/such/interpreter\n")
    for file in (odd, orphaned):
        file.chmod(0o755)
    run(parent, "sh", "-c", "exit 7", code=7)
    for command, code in (("/no/such", 127), ("/etc/passwd", 126), (str(odd), 126)):
        said = run(parent, command, code=code).stderr
        assert len(said.splitlines()) == 1, said
    assert "interpreter" in run(parent, str(orphaned), code=127).stderr
    nothing_is_left(parent)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_the_command_itself(parent: Path, number: signal.Signals) -> None:
    process = start(parent, "sleep", "60")
    (cgroup,) = runs_in(parent)
    assert [each.lane for each in marking.markings() if each.cgroup == str(cgroup)] == [2]
    process.send_signal(number)
    assert process.wait(10) == -number
    nothing_is_left(parent)


def test_whoever_outlives_the_command_keeps_its_lane(parent: Path) -> None:
    done = run(parent, "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")
    survivor = int(done.stdout)
    (cgroup,) = runs_in(parent)
    assert cgroups.processes(cgroup) == (survivor,)
    assert [each.priority for each in tag.tags_on(cgroup)] == [lane_bands()[2].priority]
    os.kill(survivor, signal.SIGKILL)
    nothing_is_left(parent)


def test_a_run_inside_a_run_has_its_own_lane(parent: Path) -> None:
    inner = [*TLSCHED, "run", "--lane", "4", "--", *TLSCHED, "marks", "--json"]
    marked = {each["cgroup"]: each["lane"] for each in json.loads(run(parent, *inner).stdout)}
    lanes = {
        path.count("/tlsched-run-"): lane for path, lane in marked.items() if str(parent) in path
    }
    assert lanes == {1: 2, 2: 4}
    nothing_is_left(parent)


def test_cgroups_that_the_command_made_go_too(parent: Path) -> None:
    where = '"$0"$(sed -n "s/^0:://p" /proc/self/cgroup)'
    script = f"mkdir -p {where}/a/b {where}/c"
    run(parent, "sh", "-c", script, str(cgroups.find_mount().point))
    nothing_is_left(parent)


def test_what_a_killed_sweeper_leaves_the_next_run_removes(parent: Path) -> None:
    process = start(parent, "sleep", "60")
    (cgroup,) = runs_in(parent)
    os.kill(sweeper_of(cgroup), signal.SIGKILL)
    run(parent, "true")
    assert runs_in(parent)[0] == cgroup  # somebody is in it still
    process.kill()
    process.wait()
    cgrouptree.eventually(lambda: not cgroups.populated(cgroup), "it is empty")
    assert cgroup.exists()
    run(parent, "true")
    assert not cgroup.exists()
    nothing_is_left(parent)


def test_a_cgroup_in_use_is_not_taken_for_a_leftover(parent: Path) -> None:
    """Empty, but locked: somebody is between making it and entering it."""
    cgroup = parent / "tlsched-run-1"
    cgroup.mkdir()
    fd = os.open(cgroup, os.O_RDONLY)
    cgroups.lock(fd, cgroup)
    run(parent, "true")
    assert cgroup.exists()
    os.close(fd)
    run(parent, "true")
    nothing_is_left(parent)


def test_killed_at_any_time_it_leaves_nothing_for_long(parent: Path) -> None:
    for delay_s in (0.1, 0.3, 0.5, 0.7, 0.9):
        process = subprocess.Popen(argv_of(parent, "sleep", "60"), stderr=subprocess.DEVNULL)
        time.sleep(delay_s)
        process.kill()
        process.wait()
    run(parent, "true")
    nothing_is_left(parent)


def test_a_refusal_leaves_nothing(parent: Path) -> None:
    with cgrouptree.foreign_program() as foreign:
        assert cgrouptree.hang(foreign, parent, 0) == 0
        assert "lets no other" in run(parent, "true", code=2).stderr
        assert list(cgroups.walk(parent)) == [parent]


def test_a_threaded_cgroup_is_refused(parent: Path) -> None:
    (parent / "cgroup.type").write_text("threaded")
    assert "threaded" in run(parent, "true", code=2).stderr
    assert list(cgroups.walk(parent)) == [parent]


def test_a_run_without_a_command_is_refused(parent: Path) -> None:
    for words in ([], ["--"]):
        argv = [*TLSCHED, "run", "--lane", "2", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
