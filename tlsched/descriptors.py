"""Room for open files (getrlimit(2), RLIMIT_NOFILE): asked for before anything is begun."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from tlsched.errors import HostError

EXHAUSTED = (errno.EMFILE, errno.ENFILE)  # the process's limit, the system's


def fill_standard() -> None:
    """Put /dev/null where 0, 1 or 2 are closed, or the next file opened would be taken for them.

    A program that this process becomes finds them closed as before (O_CLOEXEC).
    """
    fd = 0
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.close(fd)


def require(count: int) -> None:
    """Raise HostError unless this process may open ``count`` more files."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(count):
                fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, fd)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise too_few(error) from error
            raise


def too_few(error: OSError) -> HostError:
    """What to say of an error that is one of EXHAUSTED."""
    if error.errno == errno.ENFILE:
        return HostError(
            "the system has as many files open as it may", hint="see /proc/sys/fs/file-max"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostError(
        f"tlsched needs more open files than the {limit} of its limit (RLIMIT_NOFILE)",
        hint="raise it: `ulimit -n 1024`, or LimitNOFILE= of a unit",
    )
