"""Whether bcc compiles the classifier and the kernel loads it: tried, and let go again."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.bands import all_bands
from tlsched.doctor.finding import Finding, of_error
from tlsched.ebpf import compiler, program
from tlsched.errors import HostError, PermissionMissing


def findings() -> Iterator[Finding]:
    """Whether it loads, and which other package bears bcc's name."""
    try:
        with program.load(all_bands()):
            yield Finding("ok", "bcc compiles the classifier and the kernel loads it")
    except PermissionMissing:
        yield from _unprivileged()
    except HostError as error:
        yield of_error("warning", error)  # attach makes do with u32 filters
        return  # it names the other package, if there is one
    other = compiler.other_bcc()
    if other is not None:
        what = f"the Python package {other} is in the way of whoever imports bcc, tlsched excepted"
        yield Finding("note", what, "pip uninstall bcc")


def _unprivileged() -> Iterator[Finding]:
    try:
        compiler.find_bcc()
    except HostError as error:
        yield of_error("warning", error)
    else:
        what = "bcc is there; whether the kernel loads the classifier could not be tried"
        yield Finding("note", what, "run as root")
