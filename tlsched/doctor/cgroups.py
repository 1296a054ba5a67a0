"""Whether cgroup v2 is there, for marking the sockets of programs that do not do it themselves."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched import cgroups
from tlsched.doctor.finding import Finding, of_error
from tlsched.errors import FeatureMissing


def findings() -> Iterator[Finding]:
    """Where it is mounted. Attach and `tlsched.schedule()` do without."""
    try:
        mount = cgroups.find_mount()
    except FeatureMissing as error:
        yield of_error("warning", error)
    else:
        yield Finding("ok", f"cgroup v2 is mounted at {mount.point}")
