"""What some policies go by besides the plan, with defaults that do for a first iteration."""

from __future__ import annotations

from dataclasses import dataclass

from tlsched.bands import LANE_COUNT
from tlsched.errors import ConfigError
from tlsched.planning.fabric import Fabric
from tlsched.planning.profile import Profile

# Cuts lie at multiples of it, so that no element of any dtype is cut through and every piece but
# a bucket's last begins on a cache line.
ALIGN_BYTES = 64
# Long enough that a ring's start-up is a few percent of a piece at 1 to 10 Gbit/s.
PARTITION_BYTES = 2 * 1024 * 1024
# Two pieces on their way hide how long the order for the next one takes.
CREDIT_BYTES = 2 * PARTITION_BYTES


@dataclass(frozen=True, slots=True)
class Window:
    """ByteScheduler's two knobs: the largest piece of a bucket, and how much may be on its way.

    Raises ConfigError for a partition below ALIGN_BYTES or a credit below one byte.
    """

    partition_bytes: int = PARTITION_BYTES
    credit_bytes: int = CREDIT_BYTES

    def __post_init__(self) -> None:
        """Check it."""
        if self.partition_bytes < ALIGN_BYTES or self.credit_bytes < 1:
            raise ConfigError(
                f"pieces of {self.partition_bytes} bytes and {self.credit_bytes} bytes of credit "
                "cannot be",
                hint=f"give pieces of {ALIGN_BYTES} bytes or more and some credit",
            )


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """For the policies that need them; the others look at none.

    ``window`` is ``bytescheduler``'s; None: the default, and a training process tunes it.
    ``profile`` and ``fabric`` are what ``prophet`` makes its blocks from; while one of them is
    missing it sends whole buckets in the order of their gradients. ``lane_count`` is how many lanes
    ``kernel`` and ``lanes`` spread buckets over; schedule() sets it from its own ``lanes``.
    """

    window: Window | None = None
    profile: Profile | None = None
    fabric: Fabric | None = None
    lane_count: int = LANE_COUNT
