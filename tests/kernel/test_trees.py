"""Every tree through its life: attached, counted, changed, drifted, mended, detached."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable

import pytest

from tests.kernel.hostcli import attach, detach, snapshot, state, status
from tests.kernel.test_attach_faults import InjectedError, fail_at
from tests.kernel.trees import DEV, KINDS, Kind, link_for, need
from tests.netns import Namespace
from tests.tc.traffic import mark
from tlsched.bands import all_bands
from tlsched.errors import FeatureMissing, ForeignQdisc, HostError
from tlsched.tc.implied import implied_tree
from tlsched.tc.kernel import Kernel

pytestmark = [
    pytest.mark.root,
    pytest.mark.stock_kernel,
    pytest.mark.usefixtures("compiled_once"),
]
Make = Callable[[], Namespace]
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def leaf_packets(host: Namespace) -> dict[str, int]:
    """How many packets went through the queues of each band."""

    def inside() -> dict[str, int]:
        with Kernel() as kernel:
            seen = kernel.read(DEV)
        tree = implied_tree(seen)
        assert tree is not None
        counted = dict.fromkeys((band.name for band in all_bands()), 0)
        for queue in tree.queues:
            leaf = seen.leaf_of(queue.parent)
            if queue.band is not None and leaf is not None:
                counted[queue.band] += leaf.stats.packets
        return counted

    return host.call(inside)


def send(host: Namespace, lane: int | None, count: int) -> None:
    sock = host.call(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        mark(sock, None if lane is None else all_bands()[lane])
        for _ in range(count):
            sock.sendto(b"x", ("10.99.0.2", 9))


@each_kind
def test_attach_status_detach(make_netns: Make, kind: Kind) -> None:
    host, _ = link_for(kind, make_netns)
    before = snapshot(host, DEV)
    dry = attach(host, DEV, dry_run=True, **kind.settings)
    assert snapshot(host, DEV) == before
    done = attach(host, DEV, **kind.settings)
    assert (done.result, done.changes, done.notes) == ("attached", dry.changes, dry.notes)
    (link,) = status(host)
    assert (link.state, link.qdisc, link.drift) == ("attached", kind.root, ())
    guarded = kind.settings.get("default_share") != 0.0 and kind.settings.get("qdisc") != "prio"
    assert link.default_share == pytest.approx(0.05 if guarded else 0.0)
    assert any("nothing is guaranteed" in note for note in link.notes) is not guarded
    assert any("nothing is guaranteed" in note for note in done.notes) is not guarded
    assert detach(host, DEV).result == "detached"
    assert snapshot(host, DEV) == before


@each_kind
@pytest.mark.lengthy
def test_each_band_has_its_own_queue(make_netns: Make, kind: Kind) -> None:
    host, _ = link_for(kind, make_netns)
    attach(host, DEV, **kind.settings)
    send(host, None, 1)  # resolves the neighbour, for ARP is the default band's
    start = leaf_packets(host)
    for lane in range(6):
        send(host, lane, 10 + lane)
    send(host, None, 30)
    gone = {name: count - start[name] for name, count in leaf_packets(host).items()}
    lanes = {f"lane{lane}": 10 + lane for lane in range(6)}
    assert gone.pop("default") >= 30
    assert gone == lanes


@each_kind
@pytest.mark.lengthy
def test_twice_is_once_and_other_settings_change_in_place(make_netns: Make, kind: Kind) -> None:
    host, _ = link_for(kind, make_netns)
    attach(host, DEV, **kind.settings)
    before = snapshot(host, DEV)
    assert attach(host, DEV, **kind.settings).result == "unchanged"
    assert snapshot(host, DEV) == before
    changed = attach(host, DEV, **kind.other)
    assert changed.result == "changed"
    assert all(line.startswith(("change ", "replace classifier")) for line in changed.changes)
    assert state(host, DEV) == "attached"
    assert attach(host, DEV, **kind.other).result == "unchanged"


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.lengthy
def test_one_tree_takes_the_others_place(make_netns: Make, first: str) -> None:
    host, _ = link_for(KINDS[first], make_netns)
    before = snapshot(host, DEV)
    attach(host, DEV, **KINDS[first].settings)
    other = KINDS["htb" if first != "htb" else "ets"]
    need(*other.needs)
    assert attach(host, DEV, **other.settings).result == "changed"
    assert (status(host)[0].qdisc, state(host, DEV)) == (other.root, "attached")
    detach(host, DEV)
    assert snapshot(host, DEV) == before


STRICT_DRIFTS = {
    "quanta": ("ets", "qdisc change dev {dev} root handle 7150: ets bands 2 quanta 3000 1500"),
    "priomap of the lanes": (
        "ets",
        "qdisc change dev {dev} parent 7150:1 handle 7151: ets bands 6 strict 6 priomap 0 0 0",
    ),
    "lanes' qdisc": ("ets", "qdisc replace dev {dev} parent 7150:1 handle 99: pfifo limit 10"),
    "leaf removed": ("ets", "qdisc delete dev {dev} parent 7151:3"),
    "leaf limit": ("prio", "qdisc change dev {dev} parent 7150:3 handle 7162: bfifo limit 3000"),
    "leaf kind": ("prio", "qdisc replace dev {dev} parent 7150:3 handle 99: pfifo limit 10"),
    "priomap": ("prio", "qdisc change dev {dev} root handle 7150: prio bands 7 priomap 1 2 2"),
    "root filter": (
        "ets",
        "filter add dev {dev} parent 7150: prio 5 protocol ip u32 match u32 0 0 flowid 7150:1",
    ),
    "filter in the lanes": (
        "ets",
        "filter add dev {dev} parent 7151: prio 5 protocol ip u32 match u32 0 0 flowid 7151:1",
    ),
    "one queue's tree": ("mq of ets", "qdisc delete dev {dev} parent 7150:2"),
    "one queue's leaf": ("mq of ets", "qdisc delete dev {dev} parent 4018:2"),
    "root": ("mq of ets", "qdisc delete dev {dev} root"),
}


@pytest.mark.parametrize("what", STRICT_DRIFTS)
@pytest.mark.lengthy
def test_drift_is_noticed_and_mended(make_netns: Make, what: str) -> None:
    name, command = STRICT_DRIFTS[what]
    kind = KINDS[name]
    host, _ = link_for(kind, make_netns)
    before = snapshot(host, DEV)
    attach(host, DEV, **kind.settings)
    host.run("tc", *command.format(dev=DEV).split())
    assert state(host, DEV) == "drifted"
    attach(host, DEV, **kind.settings)
    (link,) = status(host)
    assert (link.state, link.drift) == ("attached", ())
    host.run("tc", *command.format(dev=DEV).split())
    detach(host, DEV)
    assert snapshot(host, DEV) == before


FOREIGN = {
    "ets": "qdisc add dev {dev} root handle 7150: ets bands 3 strict 1",
    "prio": "qdisc add dev {dev} root handle 7150: prio",
    "mq": "qdisc add dev {dev} root handle 9: mq",
}


@pytest.mark.parametrize("root", FOREIGN)
@pytest.mark.lengthy
def test_a_foreign_root_is_left_alone(make_netns: Make, root: str) -> None:
    kind = KINDS["mq of ets"]
    host, _ = link_for(kind, make_netns)
    need(root)
    host.run("tc", *FOREIGN[root].format(dev=DEV).split())
    before = snapshot(host, DEV)
    with pytest.raises(ForeignQdisc, match=root):
        attach(host, DEV, rate=None)
    assert detach(host, DEV).result == "unchanged"
    assert state(host, DEV) == "detached"
    assert snapshot(host, DEV) == before
    attach(host, DEV, rate=None, replace_root=True)
    assert state(host, DEV) == "attached"


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("step", ["attach", "change", "detach"])
@pytest.mark.parametrize("name", ["ets"])
@pytest.mark.lengthy
def test_a_fault_at_every_change_is_undone(
    make_netns: Make, monkeypatch: pytest.MonkeyPatch, name: str, step: str, applied: bool
) -> None:
    kind = KINDS[name]
    host, _ = link_for(kind, make_netns)
    if step != "attach":
        attach(host, DEV, **kind.settings)
    before, before_state = snapshot(host, DEV), state(host, DEV)
    for number in itertools.count():
        fault = fail_at(monkeypatch, number, applied, InjectedError("fault", hint="none"))
        with contextlib.suppress(InjectedError):
            if step == "detach":
                detach(host, DEV)
            else:
                attach(host, DEV, **(kind.settings if step == "attach" else kind.other))
        if not fault.fired:
            break
        after = snapshot(host, DEV)
        for what in ("class", "qdisc"):  # a tree that was deleted comes back in another order
            assert sorted(after[what].splitlines()) == sorted(before[what].splitlines())
        assert state(host, DEV) == before_state
    assert number >= 1


def test_a_device_that_takes_all_at_once_is_named(make_netns: Make) -> None:
    host, _ = link_for(KINDS["ets"], make_netns)
    assert any("give --rate" in note for note in attach(host, DEV, rate=None).notes)


def test_a_card_without_traffic_classes_is_named(make_netns: Make) -> None:
    host, _ = link_for(Kind("mqprio", ("mqprio",), 8), make_netns)
    before = snapshot(host, DEV)
    with pytest.raises(FeatureMissing, match="no traffic classes"):
        attach(host, DEV, rate=None, qdisc="mqprio")
    assert snapshot(host, DEV) == before


def test_too_few_queues_for_traffic_classes(make_netns: Make) -> None:
    host, _ = link_for(Kind("mqprio", ("mqprio",), 2), make_netns)
    with pytest.raises(FeatureMissing, match="2 transmit queues"):
        attach(host, DEV, rate=None, qdisc="mqprio")


def test_the_loopback_device_is_refused(make_netns: Make) -> None:
    host = make_netns()
    for rate in ("1gbit", None):
        with pytest.raises(HostError, match="loopback"):
            attach(host, "lo", rate=rate)


def test_a_bond_names_its_slaves(make_netns: Make) -> None:
    host, _ = link_for(KINDS["htb"], make_netns)
    if host.run("ip", "link", "add", "bond0", "type", "bond", check=False).returncode:
        pytest.skip("kernel lacks bond devices")
    host.run("ip", "link", "set", DEV, "down")
    host.run("ip", "link", "set", DEV, "master", "bond0")
    with pytest.raises(HostError, match=f"each of its slaves: {DEV}"):
        attach(host, "bond0")
    attach(host, DEV)
    assert state(host, DEV) == "attached"
