"""Attach itself, as a dry run: whatever would have it refused is found here."""

from __future__ import annotations

from collections.abc import Iterator

from tlsched import control
from tlsched.config import LinkSettings
from tlsched.control import Outcome
from tlsched.doctor.finding import Finding, of_error
from tlsched.errors import FeatureMissing, TlschedError

SOME_RATE_BPS = 10**9


def findings(iface: str, rate_bps: int | None) -> Iterator[Finding]:
    """What attach would say, with this rate or without one. Nothing is written, not even a lock."""
    try:
        outcome = _attach(iface, rate_bps)
    except FeatureMissing as error:
        yield of_error("blocker" if rate_bps or not _would_do(iface) else "warning", error, iface)
        return
    except TlschedError as error:
        yield of_error("blocker", error, iface)
        return
    yield from (Finding("note", note, about=iface) for note in outcome.notes)
    if outcome.result == "unchanged":
        yield Finding("ok", "attached; attaching again would change nothing", about=iface)
    else:
        yield Finding("ok", "nothing stands in the way of attach", about=iface)


def _would_do(iface: str) -> bool:
    """Whether attach would work if it were given a rate."""
    try:
        _attach(iface, SOME_RATE_BPS)
    except TlschedError:
        return False
    return True


def _attach(iface: str, rate_bps: int | None) -> Outcome:
    return control.attach(LinkSettings(iface, rate_bps), dry_run=True)
