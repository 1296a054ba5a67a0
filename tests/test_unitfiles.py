"""`tlsched install-unit`: what it writes, what it keeps, and what it refuses."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tlsched import unitfiles
from tlsched.cli import unit
from tlsched.errors import HostError

COMMAND = Path("/opt/tlsched/bin/tlsched")


def install(root: Path, command: Path = COMMAND) -> list[str]:
    files = unitfiles.plan(root, command)
    unitfiles.write(files)
    return [file.result for file in files]


def test_installing_twice_changes_nothing(tmp_path: Path) -> None:
    assert install(tmp_path) == ["written", "written"]
    unit = tmp_path / "etc/systemd/system/tlsched@.service"
    before = unit.stat()
    assert install(tmp_path) == ["unchanged", "kept"]
    assert unit.stat() == before
    assert stat.S_IMODE(before.st_mode) == 0o644
    present = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert present == ["etc/systemd/system/tlsched@.service", "etc/tlsched/tlsched.toml"]


def test_the_unit_is_renewed_and_the_configuration_kept(tmp_path: Path) -> None:
    install(tmp_path, Path("/opt/old/bin/tlsched"))
    config = tmp_path / "etc/tlsched/tlsched.toml"
    config.write_text('[link.eth0]\nrate = "1gbit"\n')
    assert install(tmp_path) == ["replaced", "kept"]
    assert config.read_text() == '[link.eth0]\nrate = "1gbit"\n'
    text = (tmp_path / "etc/systemd/system/tlsched@.service").read_text()
    assert f"ExecStart={COMMAND} attach" in text
    assert "/opt/old" not in text
    assert "@TLSCHED@" not in text


@pytest.mark.parametrize("theirs", ["unit", "mask", "folder"])
def test_a_unit_of_somebody_elses_is_refused(tmp_path: Path, theirs: str) -> None:
    unit = tmp_path / "etc/systemd/system/tlsched@.service"
    unit.parent.mkdir(parents=True)
    if theirs == "unit":
        unit.write_text("[Service]\nExecStart=/bin/true\n")
    elif theirs == "mask":
        unit.symlink_to("/dev/null")
    else:
        unit.mkdir()
    with pytest.raises(HostError, match="not of tlsched's making, or masked"):
        install(tmp_path)
    assert not (tmp_path / "etc/tlsched").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("")
    with pytest.raises(HostError, match="cannot be written"):
        install(tmp_path)


def test_where_one_file_cannot_be_written_none_is(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/tlsched").write_text("")
    with pytest.raises(HostError, match=r"etc/tlsched/tlsched\.toml cannot be written"):
        install(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "etc/tlsched"]


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / ".tlsched@.service.new").symlink_to(victim)
    assert install(tmp_path) == ["written", "written"]
    assert victim.read_text() == "precious"
    assert not (folder / "tlsched@.service").is_symlink()


def test_a_percent_sign_in_a_path_is_no_specifier() -> None:
    assert "ExecStop=/opt/a%%b/tlsched detach" in unitfiles.unit_text(Path("/opt/a%b/tlsched"))


@pytest.mark.parametrize(
    "place", ["/home/me/venv", "/root/src", "/tmp/venv", "/run/user/1000/v", "/var/tmp/v"]
)
def test_places_that_the_unit_cannot_see_are_refused(place: str) -> None:
    with pytest.raises(HostError, match="would be hidden from the unit"):
        unitfiles.check_reachable(COMMAND, (COMMAND, Path(place)))
    unitfiles.check_reachable(COMMAND, (COMMAND, Path("/opt/home/venv")))


def test_a_link_into_a_hidden_place_is_seen_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, link = tmp_path / "home", tmp_path / "opt-python"
    link.symlink_to(home / "python3")
    monkeypatch.setattr(unitfiles, "_HIDDEN", (home,))
    with pytest.raises(HostError, match="home/python3 would be hidden"):
        unitfiles.check_reachable(COMMAND, [link])


@pytest.mark.parametrize("path", ["/opt/my tools/tlsched", '/opt/"/tlsched', "/opt/$x/tlsched"])
def test_paths_that_a_unit_reads_otherwise_are_refused(path: str) -> None:
    with pytest.raises(HostError, match="a unit cannot name the path"):
        unitfiles.check_reachable(Path(path), ())


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_may_write_is_not_run_as_root(tmp_path: Path, mode: int) -> None:
    command = tmp_path / "tlsched"
    command.touch()
    command.chmod(mode)
    with pytest.raises(HostError, match="others than root may write"):
        unitfiles.check_owner(command)


@pytest.mark.root
def test_what_belongs_to_another_user_is_not_run_as_root(tmp_path: Path) -> None:
    command = tmp_path / "tlsched"
    command.touch(0o755)
    unitfiles.check_owner(command)
    os.chown(command, 1000, 0)
    with pytest.raises(HostError, match="others than root may write"):
        unitfiles.check_owner(command)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The command as of an installation under /opt; this one may lie in a home."""
    monkeypatch.setattr(unitfiles, "installed_command", lambda: COMMAND)
    app = typer.Typer()
    unit.register(app)
    return app


def test_a_dry_run_shows_both_files_and_writes_none(
    command_line: typer.Typer, tmp_path: Path
) -> None:
    done = CliRunner().invoke(command_line, ["--root", str(tmp_path), "--dry-run"])
    assert done.exit_code == 0
    assert f"ExecStart={COMMAND} attach" in done.stdout
    assert "[defaults]" in done.stdout
    assert done.stdout.endswith("dry run: nothing was changed\n")
    assert not list(tmp_path.iterdir())


def test_json_lists_files_and_what_to_do_next(command_line: typer.Typer, tmp_path: Path) -> None:
    for results in (["written", "written"], ["unchanged", "kept"]):
        done = CliRunner().invoke(command_line, ["--root", str(tmp_path), "--json"])
        said = json.loads(done.stdout)
        assert [file["result"] for file in said["files"]] == results
        assert all(Path(file["path"]).is_file() for file in said["files"])
        assert "systemctl daemon-reload" in said["next"]


def test_help_says_how_to_remove_it(command_line: typer.Typer) -> None:
    said = CliRunner().invoke(command_line, ["--help"], env={"COLUMNS": "120"}).stdout
    assert "systemctl enable --now tlsched@eth0" in said
    assert "To remove it" in said
