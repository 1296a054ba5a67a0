"""Whether what attach set up is still so."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched.doctor.finding import Finding
from tlsched.linkstatus import LinkStatus


def findings(status: LinkStatus | None) -> Iterator[Finding]:
    """A warning where somebody changed the link; None stands for one that may not be read. Pure."""
    if status is not None and status.state == "drifted":
        what = f"it drifted: {status.drift[0]}"
        more = len(status.drift) - 1
        what += f", and {more} more" if more else ""
        yield Finding("warning", what, "attach again", status.iface)
