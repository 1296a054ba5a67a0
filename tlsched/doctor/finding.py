"""What the doctor has to say: one thing that it looked at, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from tlsched.errors import TlschedError

# ok: as it should be. note: good to know. warning: works, but not as well or not for long.
# blocker: attach will be refused.
Level = Literal["ok", "note", "warning", "blocker"]
HOST = "host"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about ``about``, an interface or the host; nothing to do has no ``remedy``."""

    level: Level
    what: str
    remedy: str = ""
    about: str = HOST

    def as_dict(self) -> dict[str, str]:
        """The finding as `doctor --json` prints it."""
        return asdict(self)


def of_error(level: Level, error: TlschedError, about: str = HOST) -> Finding:
    """A finding that says what an error says."""
    return Finding(level, error.message, error.hint, about)
