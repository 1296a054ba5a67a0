"""`tlsched metrics`: what it prints is OpenMetrics, and the file is replaced in one step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.kernel.hostcli import attach, status, tlsched
from tests.kernel.test_reading import send
from tests.netns import Pair
from tlsched import control, livetraffic
from tlsched.bands import all_bands
from tlsched.config import LinkSettings
from tlsched.trust import make_trust

pytestmark = pytest.mark.root

Samples = dict[tuple[str, str], float]


def read_back(text: str) -> Samples:
    """Name and band, or name and state, of every sample, and its value."""
    return {
        (sample.name, sample.labels.get("band") or sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_say_what_status_says(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    send(netns_pair, all_bands()[2], 20)
    text = tlsched(host, "metrics").stdout
    assert text.endswith("# EOF\n")
    samples = read_back(text)
    (link,) = status(host)
    for band in link.bands[:-1]:  # the default band may have got a packet meanwhile
        assert samples["tlsched_band_packets_total", band.name] == band.packets
        assert samples["tlsched_band_bytes_total", band.name] == band.bytes
        assert samples["tlsched_band_drops_total", band.name] == band.drops
        assert ("tlsched_band_backlog_bytes", band.name) in samples
    assert samples["tlsched_band_packets_total", "lane2"] == 20
    assert samples["tlsched_refused_packets_total", ""] == 0
    assert samples["tlsched_link_state", "attached"] == 1
    assert samples["tlsched_link_state", "drifted"] == 0
    assert samples["tlsched_link_drifts", ""] == 0
    assert samples["tlsched_link_rate_bytes_per_second", ""] == 125_000_000
    assert samples["tlsched_link_default_share_ratio", ""] == 0.05


def test_types_are_those_that_node_exporter_takes(netns_pair: Pair) -> None:
    attach(netns_pair.a, netns_pair.a.dev)
    lines = tlsched(netns_pair.a, "metrics").stdout.splitlines()
    kinds = {line.split()[3] for line in lines if line.startswith("# TYPE ")}
    assert kinds == {"counter", "gauge"}


def test_what_was_refused_is_counted(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    host.call(control.attach, LinkSettings(dev, 10**9, trust=make_trust(uids=[65533])))
    send(netns_pair, all_bands()[2], 5)
    samples = read_back(tlsched(host, "metrics").stdout)
    assert samples["tlsched_refused_packets_total", ""] == 5
    assert samples["tlsched_band_packets_total", "lane2"] == 0
    (traffic,) = host.call(_traffic_since_nothing).links
    assert traffic.refused_per_s == 5


def _traffic_since_nothing() -> livetraffic.Traffic:
    now = livetraffic.read(None)
    before = tuple(replace(link, refused=None) for link in now.links)
    return livetraffic.between(replace(now, at_s=now.at_s - 1, links=before), now)


def test_drift_is_counted(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    host.run("tc", "filter", "delete", "dev", dev, "egress")
    samples = read_back(tlsched(host, "metrics", "--iface", dev).stdout)
    assert samples["tlsched_link_state", "drifted"] == 1
    assert samples["tlsched_link_drifts", ""] == 1


def test_without_an_attached_link_there_are_no_samples(netns_pair: Pair) -> None:
    text = tlsched(netns_pair.a, "metrics").stdout
    assert read_back(text) == {}
    assert text.endswith("# EOF\n")


def test_the_file_is_replaced_in_one_step(netns_pair: Pair, tmp_path: Path) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    file = tmp_path / "tlsched.prom"
    file.write_text("old\n")
    with file.open() as reader:
        assert tlsched(host, "metrics", "--output", str(file)).stdout == ""
        assert reader.read() == "old\n"  # whoever has it open keeps the whole old one
    assert ("tlsched_link_state", "attached") in read_back(file.read_text())
    assert file.stat().st_mode & 0o777 == 0o644  # node_exporter is another user
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_is_one_line(netns_pair: Pair, tmp_path: Path) -> None:
    missing = tmp_path / "absent" / "tlsched.prom"
    assert "cannot write" in tlsched(netns_pair.a, "metrics", "-o", str(missing), code=2).stderr
    said = tlsched(netns_pair.a, "metrics", "-o", "/dev/null", code=2).stderr
    assert "/dev/null is not a regular file" in said
    assert Path("/dev/null").is_char_device()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for wrong in (loop, loop / "tlsched.prom", tmp_path / ("x" * 300)):
        said = tlsched(netns_pair.a, "metrics", "-o", str(wrong), code=2).stderr
        assert said.startswith("error: ")
        assert said.count("\n") == 1
