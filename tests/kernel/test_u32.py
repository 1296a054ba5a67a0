"""u32 filters in the classifier's place: where BPF cannot be used, or where it is asked for."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import pytest

from tests.kernel.hostcli import attach, detach, snapshot, state, status, tlsched
from tests.kernel.test_trees import leaf_packets
from tests.kernel.trees import DEV, KINDS, features, link_for, need
from tests.netns import Namespace
from tlsched.bands import all_bands
from tlsched.ebpf import program
from tlsched.errors import ConfigError, FeatureMissing, ForeignQdisc
from tlsched.trust import make_trust

pytestmark = [
    pytest.mark.root,
    pytest.mark.stock_kernel,
    pytest.mark.usefixtures("compiled_once"),
]
Make = Callable[[], Namespace]
LANES = all_bands()[:-1]
OTHER = (46, 32, 24, 16, 12, 8)


@pytest.fixture(params=["htb", "ets", "mq of prio"])
def settings(request: pytest.FixtureRequest) -> dict[str, object]:
    """Settings of each tree, with u32."""
    kind = KINDS[request.param]
    need("u32", *kind.needs, *(() if kind.root == "htb" else ("skbedit",)))
    return {**kind.settings, "classifier": "u32"}


def send(host: Namespace, family: socket.AddressFamily, dscp: int, count: int) -> None:
    sock = host.call(socket.socket, family, socket.SOCK_DGRAM)
    with sock:
        if family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 0)
            peer: tuple[str, int] = ("10.99.0.2", 9)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
            peer = ("fd99::2", 9)
        for _ in range(count):
            sock.sendto(b"x", peer)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_dscp_alone_decides(
    make_netns: Make, settings: dict[str, object], family: socket.AddressFamily
) -> None:
    host, peer = link_for(KINDS["mq of prio" if "qdisc" in settings else "htb"], make_netns)
    for number, end in enumerate((host, peer), start=1):
        end.run("ip", "address", "add", f"fd99::{number}/64", "dev", DEV, "nodad")
    done = attach(host, DEV, **settings)  # type: ignore[arg-type]  # of several types
    assert any("DSCP alone decides" in note for note in done.notes)
    send(host, family, 0, 1)
    start = leaf_packets(host)
    for count, band in enumerate(LANES, start=10):
        assert band.dscp is not None
        send(host, family, band.dscp, count)
    gone = {name: count - start[name] for name, count in leaf_packets(host).items()}
    assert [gone[band.name] for band in LANES] == [10, 11, 12, 13, 14, 15]
    (link,) = status(host)
    assert (link.state, link.classifier) == ("attached", "u32")
    assert link.bands[0].packets == 10
    assert any("DSCP alone decides" in note for note in link.notes)


@pytest.mark.lengthy
def test_attached_twice_changed_and_detached(make_netns: Make, settings: dict[str, object]) -> None:
    host, _ = link_for(KINDS["mq of prio" if "qdisc" in settings else "htb"], make_netns)
    before = snapshot(host, DEV)
    attach(host, DEV, **settings)  # type: ignore[arg-type]  # of several types
    assert attach(host, DEV, **settings).result == "unchanged"  # type: ignore[arg-type]
    changed = attach(host, DEV, **{**settings, "dscps": OTHER})  # type: ignore[arg-type]
    assert (changed.result, state(host, DEV)) == ("changed", "attached")
    assert [band.dscp for band in status(host)[0].bands] == [*OTHER, None]
    assert attach(host, DEV, **{**settings, "classifier": "bpf"}).result == "changed"  # type: ignore[arg-type]
    assert status(host)[0].classifier == "bpf"
    assert attach(host, DEV, **settings).result == "changed"  # type: ignore[arg-type]
    assert (status(host)[0].classifier, state(host, DEV)) == ("u32", "attached")
    detach(host, DEV)
    assert snapshot(host, DEV) == before


@pytest.mark.lengthy
def test_a_filter_that_is_missing_is_drift_and_mended(
    make_netns: Make, settings: dict[str, object]
) -> None:
    host, _ = link_for(KINDS["mq of prio" if "qdisc" in settings else "htb"], make_netns)
    attach(host, DEV, **settings)  # type: ignore[arg-type]  # of several types
    where = ["parent", "7150:"] if not features().skbedit else ["egress"]
    host.run("tc", "filter", "delete", "dev", DEV, *where, "pref", str(0x7151), "protocol", "ipv6")
    assert state(host, DEV) == "drifted"
    attach(host, DEV, **settings)  # type: ignore[arg-type]  # of several types
    assert state(host, DEV) == "attached"


@pytest.mark.lengthy
def test_others_filters_stay(make_netns: Make, settings: dict[str, object]) -> None:
    host, _ = link_for(KINDS["mq of prio" if "qdisc" in settings else "htb"], make_netns)
    host.run("tc", "qdisc", "add", "dev", DEV, "clsact")
    theirs = ["protocol", "ip", "pref", "5", "u32", "match", "u32", "0", "0", "flowid", "1:1"]
    host.run("tc", "filter", "add", "dev", DEV, "egress", *theirs)
    before = snapshot(host, DEV)
    attach(host, DEV, **settings)  # type: ignore[arg-type]  # of several types
    detach(host, DEV)
    assert snapshot(host, DEV) == before


def test_an_empty_clsact_of_somebody_elses_stays(make_netns: Make) -> None:
    need("u32")
    host, _ = link_for(KINDS["htb"], make_netns)
    host.run("tc", "qdisc", "add", "dev", DEV, "clsact")
    before = snapshot(host, DEV)
    attach(host, DEV, classifier="u32")
    assert attach(host, DEV, classifier="u32").result == "unchanged"
    detach(host, DEV)
    assert snapshot(host, DEV) == before


@pytest.mark.lengthy
def test_a_foreign_filter_in_the_way_is_refused(make_netns: Make) -> None:
    need("u32")
    host, _ = link_for(KINDS["htb"], make_netns)
    host.run("tc", "qdisc", "add", "dev", DEV, "clsact")
    theirs = ["protocol", "ipv6", "pref", str(0x7151), "u32", "match", "u32", "0", "0"]
    host.run("tc", "filter", "add", "dev", DEV, "egress", *theirs)
    before = snapshot(host, DEV)
    with pytest.raises(ForeignQdisc, match="u32"):
        attach(host, DEV, classifier="u32")
    assert snapshot(host, DEV) == before


def test_auto_falls_back_and_says_so(make_netns: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    need("u32")
    host, _ = link_for(KINDS["htb"], make_netns)

    def missing(bands: Sequence[object], *_: object, **__: object) -> program.Classifier:
        raise FeatureMissing("bcc, the BPF compiler, is missing", hint="apt install it")

    monkeypatch.setattr(program, "load", missing)
    with pytest.raises(FeatureMissing, match="bcc"):
        attach(host, DEV, classifier="bpf")
    with pytest.raises(FeatureMissing, match="bcc"):
        attach(host, DEV, trust=make_trust(sources=["10.0.0.0/8"]))
    notes = attach(host, DEV).notes
    assert any("bcc" in note for note in notes)
    assert any("DSCP alone" in note for note in notes)
    assert status(host)[0].classifier == "u32"


@pytest.mark.lengthy
def test_without_cap_bpf_u32_takes_its_place(make_netns: Make) -> None:
    need("u32")
    host, _ = link_for(KINDS["htb"], make_netns)
    without = "-bpf,-sys_admin"
    drop = ("setpriv", f"--bounding-set={without}", f"--inh-caps={without}", "--")
    done = tlsched(host, "attach", "--iface", DEV, "--rate", "1gbit", prefix=drop)
    assert "note: u32 filters classify" in done.stdout
    assert "u32" in tlsched(host, "status", "--iface", DEV, prefix=drop).stdout
    detach(host, DEV)


@pytest.mark.lengthy
def test_u32_cannot_trust() -> None:
    from tlsched.config import LinkSettings

    with pytest.raises(ConfigError, match="cannot tell who"):
        LinkSettings("eth0", 10**9, classifier="u32", trust=make_trust(sources=["10.0.0.0/8"]))
