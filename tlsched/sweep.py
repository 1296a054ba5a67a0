"""Remove a run's cgroup once nobody is left in it: a script that ``runs`` starts.

``sweep.py FOLDER`` goes into the background and waits there. Its standard input is a pipe that
closes when the run's command has started, or when the run has failed or been killed before. It
imports nothing of tlsched: it lives as long as the command, so it should be small.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import time

_AGAIN_S = 0.05


def sweep(folder: str) -> None:
    """Wait for the end of standard input, then until ``folder`` is empty, and remove it."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(FileNotFoundError):
        _wait_until_empty(folder)
        while not _removed(folder):  # somebody has come in, or a run inside it is being removed
            time.sleep(_AGAIN_S)
            _wait_until_empty(folder)


def _removed(folder: str) -> bool:
    """Remove the cgroup and those that the command made below it; False when one is in use."""
    for below, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(below)
        except OSError as error:
            if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
                return False
            if error.errno != errno.ENOENT:
                raise
    return True


def _wait_until_empty(folder: str) -> None:
    """Until no process is in the cgroup or below it (cgroup.events, cgroups(7))."""
    with open(f"{folder}/cgroup.events", "rb") as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI | select.POLLERR)
        with contextlib.suppress(OSError):  # ENODEV: somebody else removed it
            while b"populated 1" in os.pread(events.fileno(), 4096, 0):
                poll.poll()


def main() -> None:
    """Detach from whoever started this, so that the command has no child that it did not make."""
    if os.fork():
        return
    # Whatever ends the command and its group, or a service, has this end as well: by itself.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
