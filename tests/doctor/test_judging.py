"""What the doctor makes of what it read: pure functions."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from tlsched.bands import DEFAULT_DSCPS
from tlsched.doctor import dcb, features, grain, queues
from tlsched.doctor.links import Link
from tlsched.netlink import attribute, attributes
from tlsched.tc.probe import KernelFeatures

LINK = Link("eth0", 2, None, None, is_loopback=False, is_up=True, gso_max_bytes=65536)
FULL = KernelFeatures(**dict.fromkeys(KernelFeatures.__dataclass_fields__, True))


def test_a_full_kernel_has_nothing_to_complain_of() -> None:
    assert [finding.level for finding in features.judge(FULL)] == ["ok"]


@pytest.mark.parametrize(
    ("lacking", "level", "words"),
    [
        (["clsact"], "blocker", "clsact"),
        (["bfifo"], "blocker", "bfifo"),
        (["htb"], "warning", "no link can have a --rate"),
        (["htb", "ets", "prio"], "blocker", "htb, ets and prio"),
        (["ets", "prio"], "note", "shaped to a rate"),
        (["bpf"], "warning", "the bpf filter"),
        (["bpf", "u32"], "blocker", "the bpf filter"),
    ],
)
def test_what_a_kernel_lacks(lacking: list[str], level: str, words: str) -> None:
    found = list(features.judge(replace(FULL, **dict.fromkeys(lacking, False))))
    assert [(item.level, words in item.what) for item in found[:-1]] == [(level, True)]
    assert found[0].remedy


@pytest.mark.parametrize(
    ("limits", "sent", "level"),
    [
        (["0", "30000"], 100, "ok"),
        (["0", "0"], 100, "warning"),
        (["0"], 0, "note"),
        ([], 100, "warning"),
    ],
)
def test_byte_queue_limits(limits: list[str], sent: int, level: str) -> None:
    finding = queues.bql_finding("eth0", limits, sent)
    assert finding.level == level
    assert bool(finding.remedy) == (level == "warning")


def test_a_rate_above_the_links_speed() -> None:
    found = list(grain.findings(LINK, rate_bps=10**10, speed_bps=10**9))
    assert [finding.level for finding in found] == ["ok", "warning", "ok"]
    assert found[1].remedy == "attach with --rate 1gbit"
    assert "524 us" in found[2].what  # packets leave at the link's speed, whatever the rate


def test_without_a_rate_the_grain_is_unknown() -> None:
    found = list(grain.findings(LINK, None, None))
    assert [finding.level for finding in found] == ["note", "note"]


def test_what_cannot_be_made_finer_has_no_remedy() -> None:
    small = replace(LINK, gso_max_bytes=16384)
    *_, finding = grain.findings(small, rate_bps=10**7, speed_bps=None)
    assert (finding.level, finding.remedy) == ("note", "")


def _answer(apps: list[tuple[int, int, int]], trust: list[int] | None = None) -> bytes:
    """What a driver with this application table and trust order answers (<linux/dcbnl.h>)."""
    table = b"".join(attribute(1, struct.pack("=BBH", *app)) for app in apps)
    ieee = attribute(3, table)
    if trust is not None:
        ieee += attribute(11, b"".join(attribute(1, bytes([selector])) for selector in trust))
    return attribute(1, b"eth0\0") + attribute(13, ieee)


def test_a_device_that_sorts_by_dscp() -> None:
    finding = dcb.judge("eth0", DEFAULT_DSCPS, _answer([(5, 6, 40), (5, 5, 32), (1, 3, 0x8906)]))
    assert finding.level == "ok"
    assert "(40:6 32:5)" in finding.what


def test_a_device_that_was_not_told_of_the_dscps() -> None:
    finding = dcb.judge("eth0", DEFAULT_DSCPS, _answer([(1, 3, 0x8906)]))
    assert finding.remedy.startswith("dcb app replace dev eth0 dscp-prio 40:6 32:5 ")


def test_a_device_that_trusts_another_field() -> None:
    finding = dcb.judge("eth0", DEFAULT_DSCPS, _answer([(5, 6, 40)], trust=[1]))
    assert finding.remedy == "dcb apptrust set dev eth0 order dscp"
    trusted = dcb.judge("eth0", DEFAULT_DSCPS, _answer([(5, 6, 40)], trust=[5, 1]))
    assert trusted.level == "ok"


def test_attributes_that_are_cut_off_end_the_list() -> None:
    whole = attribute(1, b"abc") + attribute(2, b"defgh")
    assert list(attributes(whole)) == [(1, b"abc"), (2, b"defgh")]
    assert list(attributes(whole[:9])) == [(1, b"abc")]
    assert list(attributes(bytes(8))) == []
