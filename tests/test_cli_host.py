"""What attach, detach and status say of themselves, and how they refuse bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tlsched.cli import host
from tlsched.errors import ConfigError, InterfaceMissing

app = typer.Typer()
host.register(app)
RUNNER = CliRunner()
MAIN = [sys.executable, "-c", "from tlsched.cli import main; main()"]


@pytest.mark.parametrize("command", ["attach", "detach", "status"])
def test_help_teaches_by_examples(command: str) -> None:
    said = RUNNER.invoke(app, [command, "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"}).stdout
    assert f"tlsched {command}" in said
    assert "Exit codes" in said
    for option in ("--iface", "--json"):
        assert option in said


def test_status_prints_a_list() -> None:
    done = RUNNER.invoke(app, ["status", "--json"])
    links = json.loads(done.stdout)
    assert done.exit_code == (3 if not links else done.exit_code)


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "1mbps"],
        ["--rate", "2tbit"],
        ["--rate", "1gbit", "--share", "0"],
    ],
)
def test_bad_settings_are_refused_before_the_kernel_is_asked(argv: list[str]) -> None:
    done = RUNNER.invoke(app, ["attach", "--iface", "surely-absent", *argv])
    assert isinstance(done.exception, ConfigError)


@pytest.mark.root
def test_detach_of_what_is_not_attached_says_so() -> None:
    argv = ["detach", "--iface", "lo", "--dry-run"]
    assert RUNNER.invoke(app, argv).stdout == "lo: not attached, nothing to do\n"
    assert json.loads(RUNNER.invoke(app, [*argv, "--json"]).stdout)["result"] == "unchanged"


@pytest.mark.root
def test_an_interface_that_is_gone_may_be_detached_when_asked_so() -> None:
    argv = ["detach", "--iface", "absent0"]
    assert isinstance(RUNNER.invoke(app, argv).exception, InterfaceMissing)
    done = RUNNER.invoke(app, [*argv, "--missing-ok", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["result"]) == (0, "unchanged")
    done = RUNNER.invoke(app, [*argv, "--missing-ok", "--if-drifted", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["result"]) == (0, "unchanged")


def test_flags_and_file_go_together(tmp_path: Path) -> None:
    config = tmp_path / "tlsched.toml"
    config.write_text('[link.absent0]\nrate = "1gbit"\nshare = 2\n')
    argv = ["attach", "--iface", "absent0", "--config", str(config)]
    assert "share 2.0 is out of range" in str(RUNNER.invoke(app, argv).exception)
    # With the flag in its place it is the interface's turn.
    done = RUNNER.invoke(app, [*argv, "--share", "0.1", "--dry-run"])
    assert "absent0" in str(done.exception)


@pytest.mark.parametrize("argv", [["status"], ["status", "--json"], ["lab", "status"], ["--help"]])
def test_a_full_disk_is_one_line(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MAIN, *argv], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.stderr == "error: cannot write the output (No space left on device)\n"
    assert done.returncode == 5


@pytest.mark.parametrize("argv", [["status"], ["status", "--json"], ["lab", "status"]])
def test_a_reader_that_goes_away_is_no_error(argv: list[str]) -> None:
    process = subprocess.Popen(
        [*MAIN, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 5


@pytest.mark.parametrize("command", ["detach", "status"])
def test_reading_needs_neither_bcc_nor_torch(command: str) -> None:
    code = f"""
import sys
from tlsched.cli import app, host
from tlsched.errors import TlschedError
host.register(app)
try:
    app(["{command}", "--iface", "absent0"])
except (TlschedError, SystemExit):
    pass
heavy = [m for m in sys.modules if m.split(".")[0] in ("torch", "bcc", "_tlsched_bcc", "numpy")]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_second_signal_does_not_interrupt_the_cleaning_up() -> None:
    script = """
import os, signal, sys
from tlsched import cli

@cli.app.command()
def work():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        print("cleaned up")

sys.argv = ["tlsched", "work"]
cli.main()
"""
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (129, "cleaned up\n"), done.stderr
