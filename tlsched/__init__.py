"""tlsched: the host's kernel sends first the bytes that the next forward pass needs first.

Importing this package needs neither torch nor bcc; :func:`schedule` is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tlsched.errors import TlschedError

if TYPE_CHECKING:
    from tlsched.shim.run import Run
    from tlsched.shim.training import schedule

__version__ = "0.1.0"
__all__ = ["Run", "TlschedError", "__version__", "schedule"]


def __getattr__(name: str) -> Any:
    if name in ("schedule", "Run"):
        from tlsched.shim import training  # torch is only needed from here on

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
