"""Traffic of the bands between two readings: rates from counters. Pure but for `read`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from tlsched import linkstatus, sockdiag
from tlsched.bands import Band, lane_bands
from tlsched.errors import FeatureMissing
from tlsched.linkstatus import BandStatus, LinkStatus, State
from tlsched.sockdiag import LaneSocket


@dataclass(frozen=True, slots=True)
class Reading:
    """The links and the lanes' sockets at one time (seconds of the monotonic clock).

    ``sockets`` is None where the kernel cannot list them.
    """

    at_s: float
    links: tuple[LinkStatus, ...]
    sockets: tuple[LaneSocket, ...] | None


@dataclass(frozen=True, slots=True)
class BandTraffic:
    """A band between two readings: its rate in bit/s, what waits in it, what it dropped."""

    name: str
    rate_bps: float
    packets_per_s: float
    backlog_bytes: int
    drops_per_s: float
    drops: int


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """A link's bands; ``rate_bps`` is what it is shaped to, None where it is not.

    ``refused_per_s`` are packets that bore a lane's DSCP without being trusted.
    """

    iface: str
    state: State
    rate_bps: int | None
    bands: tuple[BandTraffic, ...]
    refused_per_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What `tlsched top` shows at one time; ``interval_s`` is what the rates are taken over."""

    interval_s: float
    links: tuple[LinkTraffic, ...]
    sockets: tuple[LaneSocket, ...] | None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def read(iface: str | None) -> Reading:
    """Read one interface or all that are attached; errors as of :func:`linkstatus.status`."""
    links = tuple(linkstatus.status(iface))
    at_s = time.monotonic()
    try:
        sockets = tuple(sockdiag.lane_sockets(_lanes(links)))
    except FeatureMissing:
        return Reading(at_s, links, None)
    return Reading(at_s, links, sockets)


def between(before: Reading, after: Reading) -> Traffic:
    """The traffic from ``before`` to ``after``; a link that is new in it starts at zero."""
    interval_s = after.at_s - before.at_s
    earlier = {link.iface: link for link in before.links}
    links = tuple(_link(earlier.get(link.iface, link), link, interval_s) for link in after.links)
    return Traffic(round(interval_s, 3), links, after.sockets)


def _lanes(links: tuple[LinkStatus, ...]) -> dict[tuple[int, int], str]:
    """The marks that lead into a lane of any link, or the usual ones where nothing is attached."""
    bands: list[BandStatus | Band] = [band for link in links for band in link.bands]
    bands += [] if bands else lane_bands()
    return {
        (band.priority, band.dscp): band.name
        for band in bands
        if band.priority is not None and band.dscp is not None
    }


def _link(before: LinkStatus, after: LinkStatus, interval_s: float) -> LinkTraffic:
    earlier = {band.name: band for band in before.bands}
    bands = tuple(_band(earlier.get(band.name, band), band, interval_s) for band in after.bands)
    refused = _grown(_refused(before), _refused(after)) / interval_s
    return LinkTraffic(after.iface, after.state, after.rate_bps, bands, refused)


def _band(before: BandStatus, after: BandStatus, interval_s: float) -> BandTraffic:
    return BandTraffic(
        name=after.name,
        rate_bps=8 * _grown(before.bytes, after.bytes) / interval_s,
        packets_per_s=_grown(before.packets, after.packets) / interval_s,
        backlog_bytes=after.backlog_bytes,
        drops_per_s=_grown(before.drops, after.drops) / interval_s,
        drops=after.drops,
    )


def _refused(link: LinkStatus) -> int:
    return 0 if link.refused is None else link.refused.packets


def _grown(before: int, after: int) -> int:
    """By how much a counter grew; attached anew in between, all that the new one has counted."""
    return after - before if after >= before else after
