"""A network as fluid: transfers that share links, band before band, fairly within a band.

All hosts of the fabric do the same, so one link of each kind stands for all (see
:mod:`tlsched.planning.fabric`). A transfer's bytes load each kind by a factor of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, TypeVar

T = TypeVar("T")

_NOTHING = 1e-9  # of a link's rate: what is left by rounding


@dataclass(slots=True, eq=False)
class Transfer(Generic[T]):
    """``left`` bytes on their way; ``loads`` are bytes on each kind of link for each of them.

    One of the loads at least is above zero.

    ``band`` 0 is served first. ``what`` is the caller's.
    """

    what: T
    left: float
    loads: tuple[float, ...]
    band: int
    speed: float = field(default=0.0, init=False)  # bytes a second


class Fluid(Generic[T]):
    """Links of ``rates`` (bytes a second, one for each kind) and what is on its way over them.

    ``bulk`` endless flows load every kind of link in the last band, ``default_band``, which is
    guaranteed ``share`` of each link while anything is in it.
    """

    def __init__(
        self, rates: Sequence[float], *, bulk: int, share: float, default_band: int
    ) -> None:
        self.rates = list(rates)
        self.bulk = bulk
        self.sent = [0.0] * len(self.rates)
        self._share = share
        self._default_band = default_band
        self._moving: list[Transfer[T]] = []
        self._served: list[Transfer[T]] = []  # those of them that are given any speed
        self._stale = False

    def add(self, transfer: Transfer[T]) -> None:
        """``transfer`` begins."""
        self._moving.append(transfer)
        self._stale = True

    def set_rates(self, rates: Iterable[float]) -> None:
        """The links are of other rates from now on."""
        self.rates = list(rates)
        self._stale = True

    def next_end_s(self) -> float:
        """Seconds until the first transfer ends if nothing changes; infinite when none moves."""
        if self._stale:
            self._allot()
        return min((t.left / t.speed for t in self._served), default=math.inf)

    def advance(self, seconds: float) -> list[Transfer[T]]:
        """Let ``seconds`` pass (not beyond the first end) and return what has ended."""
        if self._stale:
            self._allot()
        ended = []
        for transfer in self._served:
            moved = transfer.speed * seconds
            transfer.left -= moved
            for kind, load in enumerate(transfer.loads):
                self.sent[kind] += load * moved
            # A byte is less than rounding leaves of a large transfer; nothing waits for less.
            if transfer.left <= max(_NOTHING * transfer.speed, 1e-6):
                ended.append(transfer)
        if ended:
            self._moving = [t for t in self._moving if t not in ended]
            self._stale = True
        return ended

    def _allot(self) -> None:
        """Speeds: strict between bands, and within one equal for all until a link is full."""
        self._stale = False
        for transfer in self._moving:
            transfer.speed = 0.0
        lanes = [t for t in self._moving if t.band < self._default_band]
        others = [t for t in self._moving if t.band >= self._default_band]
        kept = self._share if others or self.bulk else 0.0
        left = [rate * (1.0 - kept) for rate in self.rates]
        for _, members in groupby(sorted(lanes, key=_band), key=_band):
            _share_fairly(list(members), left, bulk=0)
            if max(left) <= 0:  # with many bands, most of them wait
                break
        left = [rest + rate * kept for rest, rate in zip(left, self.rates, strict=True)]
        _share_fairly(others, left, bulk=self.bulk)
        self._served = [t for t in self._moving if t.speed > 0]


def _band(transfer: Transfer[T]) -> int:
    return transfer.band


def _share_fairly(members: list[Transfer[T]], left: list[float], *, bulk: int) -> None:
    """Max-min fairness (Bertsekas and Gallager, Data Networks, 6.5.2); takes it from ``left``.

    One transfer is one connection a link, and every bulk flow another; they grow alike in bytes on
    the link that they load most.
    """
    growing = members
    whole = list(left)
    while growing:
        loads = [
            bulk + sum(t.loads[kind] / max(t.loads) for t in growing) for kind in range(len(left))
        ]
        step = min(
            rest / load
            for kind, (rest, load) in enumerate(zip(left, loads, strict=True))
            if any(t.loads[kind] for t in growing)
        )
        for transfer in growing:
            transfer.speed += step / max(transfer.loads)
        for kind, load in enumerate(loads):
            left[kind] -= step * load
        full = {kind for kind, rest in enumerate(left) if rest <= _NOTHING * whole[kind]}
        for kind in full:
            left[kind] = 0.0
        growing = [t for t in growing if not any(t.loads[kind] for kind in full)]
