"""Room in this process's address space (getrlimit(2), RLIMIT_AS): asked for beforehand.

What runs out of it inside a library written in C++ is aborted, without a word and without undoing.
"""

from __future__ import annotations

import mmap

from tlsched.errors import HostError


def require(size_bytes: int, purpose: str) -> None:
    """Raise HostError unless ``size_bytes`` more may be mapped, as ``purpose`` needs it."""
    try:
        mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ).close()  # takes no memory
    except OSError as error:
        raise HostError(
            f"{purpose} needs {size_bytes >> 20} MiB of address space, more than is left"
            " (RLIMIT_AS)",
            hint="raise it: `ulimit -v unlimited`, or LimitAS= of a unit",
        ) from error
