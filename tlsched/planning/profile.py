"""The profile: per bucket its bytes, when its gradient is ready and when forward needs it.

Times are those of the computing alone, as if the network took none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tlsched.errors import ConfigError

FORMAT = "tlsched profile 1"
MOST_S = 1e6  # of a pass: more is no time, and too much for the simulation's arithmetic
MOST_BYTES = 2**50  # of a bucket: more fits in no machine, and in no float exactly


@dataclass(frozen=True, slots=True)
class BucketProfile:
    """One bucket: ``ready_s`` after backward's begin, ``needed_s`` after forward's begin.

    ``kind`` is dtype and device where they differ: only buckets of one kind can be fused.
    """

    names: tuple[str, ...]
    bytes: int
    ready_s: float
    needed_s: float
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Buckets in need order, and the seconds that a forward and a backward compute.

    Raises ConfigError for what cannot be: negative sizes or times, times past the end of their
    pass, or buckets out of need order.
    """

    buckets: tuple[BucketProfile, ...]
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        """Check it."""
        times = (self.forward_s, self.backward_s)
        if not all(0 <= time_s <= MOST_S for time_s in times):
            raise _bad(f"its passes take {self.forward_s} s and {self.backward_s} s")
        before_s = 0.0
        for number, bucket in enumerate(self.buckets):
            if not 0 <= bucket.bytes <= MOST_BYTES or not 0 <= bucket.ready_s <= self.backward_s:
                raise _bad(f"bucket {number} has {bucket.bytes} bytes, ready at {bucket.ready_s} s")
            if not before_s <= bucket.needed_s <= self.forward_s:
                raise _bad(f"bucket {number} is needed at {bucket.needed_s} s")
            before_s = bucket.needed_s

    @property
    def bytes(self) -> int:
        """All gradients."""
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def compute_s(self) -> float:
        """What an iteration computes."""
        return self.forward_s + self.backward_s

    @property
    def launch_order(self) -> tuple[int, ...]:
        """The buckets' indices in the order of their gradients."""
        ready = [bucket.ready_s for bucket in self.buckets]
        # Gradients that come together leave with the least urgent first, as backward makes them.
        return tuple(sorted(range(len(ready)), key=lambda index: (ready[index], -index)))

    def save(self, path: str | Path) -> None:
        """Write it as JSON. Raises ConfigError when the file cannot be written."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        try:
            Path(path).write_text(text)
        except OSError as error:
            raise ConfigError(
                f"profile {path} cannot be written ({error.strerror})", hint="name another file"
            ) from error


def load_profile(path: str | Path) -> Profile:
    """Read what :meth:`Profile.save` wrote. Raises ConfigError when the file is no profile."""
    try:
        values = json.loads(Path(path).read_text())
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        buckets = tuple(_bucket(value) for value in values["buckets"])
        if not buckets:
            raise ValueError("it has no buckets")
        return Profile(buckets, float(values["forward_s"]), float(values["backward_s"]))
    except OSError as error:
        raise ConfigError(
            f"profile {path} cannot be read ({error.strerror})", hint="see run.profile.save()"
        ) from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{path} is not a profile ({error})", hint="make one with run.profile.save()"
        ) from error


def median_profile(profiles: Sequence[Profile]) -> Profile:
    """The median, time by time, of profiles of the same buckets (several iterations of one run)."""
    return _combined(profiles, lambda values: float(median(values)))


def slowest_profile(profiles: Sequence[Profile]) -> Profile:
    """The latest of each time, of profiles of the same buckets (all ranks of one run)."""
    return _combined(profiles, max)


def _combined(profiles: Sequence[Profile], choose: Any) -> Profile:
    first = profiles[0]
    forward_s = choose([p.forward_s for p in profiles])
    backward_s = choose([p.backward_s for p in profiles])
    buckets = []
    before_s = 0.0
    for index, bucket in enumerate(first.buckets):
        ready_s = min(choose([p.buckets[index].ready_s for p in profiles]), backward_s)
        needed_s = min(choose([p.buckets[index].needed_s for p in profiles]), forward_s)
        before_s = max(before_s, needed_s)  # medians of ordered times need not be ordered
        buckets.append(replace(bucket, ready_s=ready_s, needed_s=before_s))
    return Profile(tuple(buckets), forward_s, backward_s)


def _bucket(value: dict[str, Any]) -> BucketProfile:
    return BucketProfile(
        tuple(value["names"]),
        int(value["bytes"]),
        float(value["ready_s"]),
        float(value["needed_s"]),
        str(value.get("kind", "")),
    )


def _bad(what: str) -> ConfigError:
    return ConfigError(f"this profile cannot be: {what}", hint="measure it again")
