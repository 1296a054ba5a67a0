"""Standard output that cannot be written, told apart from every other failure."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class OutputLost(Exception):
    """Standard output cannot be written; ``closed`` when its reader has gone away.

    Not an OSError: typer and rich end the program with 1 for some of those, which means here that
    a change was undone.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.closed = isinstance(error, BrokenPipeError)


class _Output(io.TextIOWrapper):
    def write(self, text: str) -> int:
        with _told_apart():
            return super().write(text)

    def flush(self) -> None:
        with _told_apart():
            super().flush()


@contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputLost(error) from None


def watch() -> None:
    """From now on, whoever prints gets OutputLost where the output cannot be written."""
    plain = sys.stdout
    if isinstance(plain, io.TextIOWrapper):  # else closed, or somebody catches it in memory
        sys.stdout = _Output(
            plain.buffer,
            encoding=plain.encoding,
            # Names of cgroups and files may be any bytes: one of them must not end a command that
            # has changed something already, or hide all others in a list.
            errors="backslashreplace" if plain.errors == "strict" else plain.errors,
            line_buffering=plain.line_buffering,
            write_through=plain.write_through,
        )


def one_line(text: str) -> str:
    """``text`` without what would break its line or steer a terminal: a cgroup's name may."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def discard() -> None:
    """Drop what is not written yet: the interpreter tries again at its end, and would complain."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
