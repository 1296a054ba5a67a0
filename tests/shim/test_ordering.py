"""Whether the kernel orders the lanes, as far as a training process can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlsched.shim import ordering
from tlsched.shim.ordering import unordered_interfaces, what_orders_nothing

ELSEWHERE = [("192.0.2.1", "192.0.2.2")]


def test_without_ip_and_tc_it_is_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ordering, "SYSTEM_FOLDERS", ())
    assert unordered_interfaces(ELSEWHERE) is None
    assert "unknown" in str(what_orders_nothing(ELSEWHERE))


def test_an_ordinary_users_path_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert unordered_interfaces(ELSEWHERE) == []


def test_what_stays_on_this_host_passes_no_link() -> None:
    assert what_orders_nothing([("127.0.0.1", "127.0.0.1")]) is None
