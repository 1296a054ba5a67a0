"""Rates and settings: what people write, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlsched.config import MAX_RATE_BPS, LinkSettings, format_rate, parse_rate, share_bps
from tlsched.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [
        ("1gbit", 10**9),
        ("1Gbit", 10**9),
        ("1.5gbit", 1_500_000_000),
        ("100mbit", 10**8),
        ("400gbit", 400 * 10**9),
        ("1tbit", 10**12),
        ("2500000", 2_500_000),
        ("2500000bit", 2_500_000),
        (" 10 gbit ", 10**10),
        ("1e9", 10**9),
        ("1000mibit", 1000 * 2**20),
        ("1000001", 1_000_000),  # the kernel counts whole bytes a second
    ],
)
def test_rates_as_people_write_them(text: str, rate_bps: int) -> None:
    assert parse_rate(text) == rate_bps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "not above zero"),
        ("-1gbit", "not above zero"),
        ("7bit", "not above zero"),
        ("nan", "not a finite number"),
        ("inf", "not a finite number"),
        ("1e400gbit", "above 1 Tbit/s"),
        ("1e999999999", "above 1 Tbit/s"),
        ("1e9999999999999999999999gbit", "above 1 Tbit/s"),
        ("1e-99999999999999999999gbit", "not above zero"),
        ("1e-999999999999999999", "not above zero"),
        ("-1e9999999999999999999999", "not above zero"),
        ("0e9999999999999999999999", "not above zero"),
        ("2tbit", "above 1 Tbit/s"),
        ("", "not understood"),
        ("fast", "not understood"),
        ("1,5gbit", "not understood"),
        ("1gbit 2", "not understood"),
        ("1parsec", 'unknown unit "parsec"'),
        ("1gb", 'unknown unit "gb"'),
        ("125mbps", 'write "125mbit" if you mean bits'),
        ("125MBps", 'write "125mbit" if you mean bits'),
        ("1000bps", 'write "1000bit" if you mean bits'),
        ("1gbit/s", 'write "1gbit"'),
    ],
)
def test_impossible_rates_say_what_to_write(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_rate(text)
    assert words in str(raised.value)
    assert raised.value.exit_code == 2


@given(st.integers(1, MAX_RATE_BPS // 8))
def test_a_rate_written_out_reads_back(bytes_a_second: int) -> None:
    rate_bps = bytes_a_second * 8
    assert parse_rate(format_rate(rate_bps)) == rate_bps


def test_settings_of_an_ordinary_link() -> None:
    settings = LinkSettings("eth0.100", 10**9)
    assert share_bps(10**9, settings.share) == 50_000_000
    assert [band.name for band in settings.bands][-1] == "default"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rate_bps": 0}, "not above zero"),
        ({"rate_bps": 1_000_000}, "cannot carry one packet a second"),
        ({"default_share": 0.0}, "out of range"),
        ({"default_share": 1.0}, "out of range"),
        ({"default_share": float("nan")}, "out of range"),
        ({"dscps": (1, 2, 3)}, "distinct DSCPs"),
        ({"dscps": (48, 40, 32, 24, 16, 8)}, "network control"),
        ({"iface": ""}, "interface name"),
        ({"iface": "a/b"}, "interface name"),
        ({"iface": "eth0:1"}, "interface name"),
        ({"iface": "much-too-long-name"}, "interface name"),
    ],
)
def test_settings_that_cannot_work(values: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"iface": "eth0", "rate_bps": 10**9}
    with pytest.raises(ConfigError, match=words):
        LinkSettings(**{**good, **values})  # type: ignore[arg-type]  # wrong on purpose
