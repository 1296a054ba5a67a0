"""The files that `tlsched install-unit` puts in place: the systemd unit and a sample configuration.

The unit is a template (systemd.unit(5)) in which only the path of tlsched's command is filled in.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tlsched.errors import HostError

UNIT_PATH = Path("etc/systemd/system/tlsched@.service")
CONFIG_PATH = Path("etc/tlsched/tlsched.toml")
_TEMPLATES = Path(__file__).parent / "systemd"
_OURS = "# tlsched@.service, written by `tlsched install-unit`"
# What ProtectHome= and PrivateTmp= of the unit hide from it (systemd.exec(5)).
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))
_INSTALL_HINT = (
    "install it where services may read it: /usr/bin/python3 -m venv --clear /opt/tlsched &&"
    " /opt/tlsched/bin/pip install ., as root"
)


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file to install, and what becomes of it: "written", "replaced", "unchanged" or "kept"."""

    path: Path
    text: str
    result: str

    @property
    def changes(self) -> bool:
        """Whether writing it changes anything."""
        return self.result in ("written", "replaced")


def plan(root: Path, command: Path) -> tuple[UnitFile, UnitFile]:
    """The unit and the configuration as they are to be under ``root``; changes nothing.

    A unit of an earlier version is replaced; a configuration that exists is kept, whatever it
    says. Raises HostError for a unit that is somebody else's, or masked.
    """
    unit, config = root / UNIT_PATH, root / CONFIG_PATH
    text = unit_text(command)
    present = _present(unit)
    if present is not None and not present.startswith(_OURS):
        raise HostError(
            f"{unit} is not of tlsched's making, or masked",
            hint="move it away (`systemctl unmask tlsched@.service` if it is masked)",
        )
    unit_result = "written" if present is None else "replaced"
    sample = (_TEMPLATES / "tlsched.toml").read_text()
    return (
        UnitFile(unit, text, "unchanged" if present == text else unit_result),
        UnitFile(config, sample, "kept" if os.path.lexists(config) else "written"),
    )


def write(files: Iterable[UnitFile]) -> None:
    """Put in place those that change: all of them, each whole, or none. Raises HostError."""
    beside: list[tuple[Path, UnitFile]] = []
    try:
        for file in files:
            if file.changes:
                new = file.path.with_name(f".{file.path.name}.new")
                beside.append((new, file))
                with _said(file.path):
                    _write_new(new, file.text)
        for new, file in beside:
            with _said(file.path):
                new.replace(file.path)
    finally:
        for new, _ in beside:
            with contextlib.suppress(OSError):
                new.unlink()


def _write_new(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of one that was killed; a link there must not be followed
    with path.open("x") as file:
        file.write(text)
    path.chmod(0o644)


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """An OSError as ours, which names the file that was to be written."""
    try:
        yield
    except OSError as error:
        denied = isinstance(error, PermissionError)
        raise HostError(
            f"{path} cannot be written ({error.strerror})",
            hint="run it as root" if denied else f"see what `ls -ld {path.parent}` shows",
        ) from error


def unit_text(command: Path) -> str:
    """The unit that runs ``command``."""
    template = (_TEMPLATES / "tlsched@.service").read_text()
    return template.replace("@TLSCHED@", str(command).replace("%", "%%"))


def installed_command() -> Path:
    """This installation's `tlsched`. Raises HostError where a service could not run it."""
    folders = (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent)
    command = next((f / "tlsched" for f in folders if (f / "tlsched").is_file()), None)
    if command is None:
        raise HostError("the command tlsched is not installed", hint=_INSTALL_HINT)
    needed = (command, Path(sys.executable), Path(sys.base_prefix), Path(__file__))
    check_reachable(command, needed)
    for path in (command, Path(sys.executable)):
        check_owner(path)
    return command


def check_reachable(command: Path, needed: Iterable[Path]) -> None:
    """Raise HostError unless the unit can name ``command`` and see all that it needs."""
    if re.search(r"[^\w@%+=:,./-]", str(command)):  # white space and quotes mean something there
        raise HostError(f"a unit cannot name the path {command}", hint=_INSTALL_HINT)
    for path in needed:
        for place in (path.absolute(), path.resolve()):
            hiding = [folder for folder in _HIDDEN if place.is_relative_to(folder)]
            if hiding:
                raise HostError(
                    f"{place} would be hidden from the unit, as all of {hiding[0]} is",
                    hint=_INSTALL_HINT,
                )


def check_owner(path: Path) -> None:
    """Raise HostError unless root alone may write what root is going to run."""
    found = path.stat()
    if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HostError(
            f"others than root may write {path.resolve()}, which the unit would run as root",
            hint=_INSTALL_HINT,
        )


def _present(path: Path) -> str | None:
    """The text of a file that exists, "" for what is no plain file (a mask is a link)."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink() or not path.is_file():
        return ""
    return path.read_text(errors="replace")
