"""Becoming another program: what `lab exec` and `run` end with."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import NoReturn

from tlsched.errors import TlschedError


class CommandMissing(TlschedError):
    """There is no such command."""

    exit_code = 127  # as of a shell


class CommandRefused(TlschedError):
    """The command is there and cannot be run."""

    exit_code = 126


def check_runs(program: str) -> None:
    """Raise CommandMissing or CommandRefused unless ``program`` is an executable file."""
    if shutil.which(program, os.F_OK) is None:
        raise CommandMissing(
            f"there is no command {program}", hint="check its name, or give its whole path"
        )
    if shutil.which(program) is None:
        raise CommandRefused(f"{program} may not be run", hint="see its mode with `ls -l`")


def become(argv: list[str]) -> NoReturn:
    """Turn this process into the command: nothing stands in between. Errors as of check_runs."""
    if sys.stdout is not None:  # it was closed from the start
        sys.stdout.flush()
    # Python ignores these two, and what is ignored stays so across execve(2).
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError as error:
        raise CommandMissing(
            f"{argv[0]} cannot be run: its interpreter is missing", hint="see its first line"
        ) from error
    except OSError as error:
        raise CommandRefused(
            f"{argv[0]} cannot be run: {error.strerror}", hint="is it a program of this machine?"
        ) from error
