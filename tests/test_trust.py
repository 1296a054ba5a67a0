"""Who may use the lanes, as people write it: read, refused, and said in words."""

from __future__ import annotations

import pwd
from typing import Any

import pytest

from tlsched.config import LinkSettings
from tlsched.errors import ConfigError
from tlsched.trust import Trust, check_trust, describe_change, make_trust


def test_without_a_word_every_local_socket_and_no_forwarded_packet_is_trusted() -> None:
    assert make_trust() == Trust() == LinkSettings("eth0", 10**9).trust
    assert Trust().any_local
    assert Trust(sources=("10.0.0.0/8",)).any_local
    assert not Trust(uids=(0,)).any_local
    assert not Trust(cgroups=("/",)).any_local


def test_order_spelling_and_repetition_do_not_matter() -> None:
    written = make_trust(
        cgroups=["/b.slice/", "//a.slice//x", "/b.slice"],
        uids=["1001", 7, 1001],
        sources=["fd00:0::/8", "10.1.2.3", "10.0.0.0/255.0.0.0", "fd00::/8"],
    )
    assert written == Trust(
        cgroups=("/a.slice/x", "/b.slice"),
        uids=(7, 1001),
        sources=("10.0.0.0/8", "10.1.2.3/32", "fd00::/8"),
    )
    assert make_trust(written.cgroups, written.uids, written.sources) == written


def test_a_user_may_be_named() -> None:
    assert make_trust(uids=["root"]).uids == (pwd.getpwnam("root").pw_uid,)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cgroups": ["training.slice"]}, "not an absolute path.*training.slice"),
        ({"cgroups": [""]}, "not an absolute path"),
        ({"cgroups": ["/a/../b"]}, "not an absolute path"),
        ({"cgroups": ["/a\0b"]}, "not an absolute path"),
        ({"cgroups": [7]}, "not an absolute path"),
        ({"uids": ["no-such-user-here"]}, "no user.*getent"),
        ({"uids": ["-1"]}, "no user"),
        ({"uids": [-1]}, "out of range"),
        ({"uids": [2**32 - 1]}, "out of range"),
        ({"uids": ["9" * 5000]}, "out of range"),
        ({"uids": [True]}, "is no user"),
        ({"uids": [1.5]}, "is no user"),
        ({"uids": [65534]}, "nobody.*cannot name"),
        ({"sources": ["10.0.0.1/8"]}, 'write "10.0.0.0/8"'),
        ({"sources": ["fd00::1/8"]}, 'write "fd00::/8"'),
        ({"sources": ["10.0.0.0/33"]}, "no address prefix"),
        ({"sources": ["example.org"]}, "no address prefix"),
        ({"sources": ["fe80::1%eth0"]}, "no address prefix"),
        ({"sources": [10]}, "no address prefix"),
        ({"uids": range(2000)}, "2000 entries"),
    ],
    ids=repr,
)
def test_what_cannot_be_meant_is_refused_with_a_way_out(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_trust(**wrong)
    raw = Trust(**{kind: tuple(values) for kind, values in wrong.items()})
    with pytest.raises(ConfigError, match=said):
        check_trust(raw)
    with pytest.raises(ConfigError, match=said):
        LinkSettings("eth0", 10**9, trust=raw)


def test_it_is_said_in_one_line() -> None:
    both = Trust(("/a",), (7, 8), ("10.0.0.0/8",))
    assert Trust().describe() == "every local socket"
    assert both.describe() == "cgroups /a, uids 7, 8, sources 10.0.0.0/8"
    assert describe_change(Trust(uids=(7,)), both) == (
        "change trust: cgroups none -> /a; uids 7 -> 7, 8; sources none -> 10.0.0.0/8"
    )
    assert describe_change(both, both) == f"change trust: write anew {both.describe()}"
    assert describe_change(both, Trust(sources=both.sources)) == (
        "change trust: local sockets listed -> any; cgroups /a -> none; uids 7, 8 -> none"
    )
