"""Attach itself, as a dry run: whatever would have it refused is found here."""

from __future__ import annotations

from tlsched import control
from tlsched.config import LinkSettings
from tlsched.doctor.finding import Finding, of_error
from tlsched.errors import TlschedError

ANY_RATE_BPS = 10**9


def finding(iface: str, rate_bps: int | None) -> Finding:
    """What attach would say. It writes nothing, not even a lock."""
    settings = LinkSettings(iface, rate_bps or ANY_RATE_BPS)
    try:
        outcome = control.attach(settings, dry_run=True)
    except TlschedError as error:
        return of_error("blocker", error, iface)
    if outcome.result == "unchanged":
        return Finding("ok", "attached; attaching again would change nothing", about=iface)
    return Finding("ok", "nothing stands in the way of attach", about=iface)
