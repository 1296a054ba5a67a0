"""The state of the links in OpenMetrics' text format, for node_exporter's textfile collector.

Only counters and gauges: that collector reads the older Prometheus format, which takes everything
else here for comments but refuses a whole file for a type it does not know (OpenMetrics' info and
stateset). Source: OpenMetrics 1.0, and Prometheus' metric and label naming.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from tlsched.linkstatus import LinkStatus, State


def openmetrics(links: Sequence[LinkStatus]) -> str:
    """The text, its last line "# EOF". Without links only the names of the metrics."""
    text: bytes = generate_latest(_Links(links))
    return text.decode()


class _Links(Collector):
    def __init__(self, links: Sequence[LinkStatus]) -> None:
        self._links = links

    def collect(self) -> Iterator[Metric]:
        yield from _of_bands(self._links)
        yield from _of_refused(self._links)
        yield from _of_links(self._links)


def _of_bands(links: Sequence[LinkStatus]) -> Iterator[Metric]:
    labels = ("iface", "band")
    packets = CounterMetricFamily(
        "tlsched_band_packets", "Packets that the classifier put into the band.", labels=labels
    )
    size = CounterMetricFamily(
        "tlsched_band_bytes", "Their bytes, headers included.", labels=labels, unit="bytes"
    )
    drops = CounterMetricFamily(
        "tlsched_band_drops", "Packets that the band's full queue dropped.", labels=labels
    )
    backlog = GaugeMetricFamily(
        "tlsched_band_backlog_bytes", "What waits in the band now.", labels=labels, unit="bytes"
    )
    for link in links:
        for band in link.bands:
            where = (link.iface, band.name)
            packets.add_metric(where, band.packets)
            size.add_metric(where, band.bytes)
            drops.add_metric(where, band.drops)
            backlog.add_metric(where, band.backlog_bytes)
    yield from (packets, size, drops, backlog)


def _of_links(links: Sequence[LinkStatus]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "tlsched_link_state", "1 for the state that the link is in.", labels=("iface", "state")
    )
    drifts = GaugeMetricFamily(
        "tlsched_link_drifts", "Things that are not as attach left them.", labels=("iface",)
    )
    rate = GaugeMetricFamily(
        "tlsched_link_rate_bytes_per_second",
        "The rate that the link is shaped to.",
        labels=("iface",),
    )
    share = GaugeMetricFamily(
        "tlsched_link_default_share_ratio",
        "Part of the rate that the default band is guaranteed.",
        labels=("iface",),
    )
    for link in links:
        for word in get_args(State):
            state.add_metric((link.iface, word), float(link.state == word))
        drifts.add_metric((link.iface,), len(link.drift))
        if link.rate_bps is not None:
            rate.add_metric((link.iface,), link.rate_bps / 8)
        if link.default_share is not None:
            share.add_metric((link.iface,), link.default_share)
    yield from (state, drifts, rate, share)


def _of_refused(links: Sequence[LinkStatus]) -> Iterator[Metric]:
    packets = CounterMetricFamily(
        "tlsched_refused_packets",
        "Packets that bore a lane's DSCP without being trusted, and lost it.",
        labels=("iface",),
    )
    size = CounterMetricFamily(
        "tlsched_refused_bytes", "Their bytes.", labels=("iface",), unit="bytes"
    )
    for link in links:
        if link.refused is not None:
            packets.add_metric((link.iface,), link.refused.packets)
            size.add_metric((link.iface,), link.refused.bytes)
    yield from (packets, size)
