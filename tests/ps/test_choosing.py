"""What servers= may be, and what servers cannot sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tlsched.errors import ConfigError, ModelRefused
from tlsched.shim.ps.choosing import Servers, choose_servers
from tlsched.shim.ps.listening import parse_address

NET = nn.Linear(2, 2)


def test_servers_are_started_ranks_or_addresses() -> None:
    assert choose_servers(NET, None) == Servers()
    assert choose_servers(NET, 2) == Servers(ranks=2)
    given = ["10.0.0.5:7150", "[fd00::5]:80", "name.example:1"]
    expected = (("10.0.0.5", 7150), ("fd00::5", 80), ("name.example", 1))
    assert choose_servers(NET, given) == Servers(addresses=expected)


@pytest.mark.parametrize("given", [0, -1, True, [], "10.0.0.5:7150", ["10.0.0.5"], ["fd00::5:80"]])
def test_bad_argument_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        choose_servers(NET, given)


@pytest.mark.parametrize(
    "text", ["", ":", "host:", ":7150", "host:-1", "host:70000", "host:x", "[]:1"]
)
def test_bad_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)


def test_what_servers_cannot_sum_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelRefused, match=r"1\.weight is on meta"):
        choose_servers(net, None)
    odd = nn.Linear(2, 2)
    odd.weight = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn))
    with pytest.raises(ModelRefused, match=r"weight is torch\.float8_e4m3fn"):
        choose_servers(odd, None)
