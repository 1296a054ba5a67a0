"""Which tree a link gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tlsched.bands import FIRST_MAPPED, all_bands, mapped_bands
from tlsched.config import LinkSettings
from tlsched.errors import ConfigError, FeatureMissing
from tlsched.tc.choice import choose, tree_for
from tlsched.tc.device import Device
from tlsched.tc.options import Bfifo, Ets, Mq, Mqprio, Prio
from tlsched.tc.probe import KernelFeatures
from tlsched.tc.strict import MAX_QUANTUM_BYTES, MAX_QUEUES, leaf_limit_bytes, share_of

ALL = KernelFeatures(*[True] * 10)
HTB_ONLY = replace(ALL, ets=False, prio=False, mqprio=False)
CARD = Device("eth0", 2, speed_bps=10**10)
VETH = Device("eth0", 2, kind="veth")


def chosen(features: KernelFeatures = ALL, device: Device = CARD, **settings: Any) -> Any:
    return choose(LinkSettings("eth0", **settings), device, lambda: features)


@pytest.mark.parametrize(
    ("features", "device", "settings", "kind", "share", "said"),
    [
        (ALL, CARD, {"rate_bps": 10**9}, "htb", 0.05, ""),
        (HTB_ONLY, VETH, {"rate_bps": 10**9}, "htb", 0.05, ""),
        (ALL, CARD, {}, "ets", 0.05, ""),
        (ALL, VETH, {}, "ets", 0.05, "give --rate"),
        (ALL, CARD, {"default_share": 0.5}, "ets", 0.5, ""),
        (ALL, CARD, {"default_share": 0.0}, "prio", 0.0, "nothing is guaranteed"),
        (ALL, CARD, {"qdisc": "prio"}, "prio", 0.0, "nothing is guaranteed"),
        (replace(ALL, ets=False), CARD, {}, "prio", 0.0, "nothing is guaranteed"),
        (replace(ALL, ets=False), CARD, {"default_share": 0.2}, "htb", 0.2, "device's speed"),
        (HTB_ONLY, CARD, {}, "htb", 0.05, "10gbit"),
        (ALL, CARD, {"qdisc": "htb"}, "htb", 0.05, "10gbit"),
        (ALL, replace(CARD, tx_queues=8), {"qdisc": "mqprio"}, "mqprio", 0.0, "card"),
    ],
)
def test_what_fits(
    features: KernelFeatures,
    device: Device,
    settings: dict[str, Any],
    kind: str,
    share: float,
    said: str,
) -> None:
    choice = chosen(features, device, **settings)
    assert (choice.kind, choice.share) == (kind, share)
    assert said in " ".join(choice.notes)
    assert bool(choice.notes) is bool(said)


@pytest.mark.parametrize(
    ("features", "device", "settings", "said"),
    [
        (HTB_ONLY, VETH, {}, "give --rate"),
        (replace(ALL, ets=False), VETH, {"default_share": 0.2}, "give --rate"),
        (replace(ALL, prio=False), CARD, {"default_share": 0.0}, "lacks the qdisc prio"),
        (HTB_ONLY, CARD, {"qdisc": "ets"}, "lacks the qdisc ets"),
        (HTB_ONLY, CARD, {"qdisc": "mqprio"}, "lacks the qdisc mqprio"),
        (ALL, CARD, {"qdisc": "mqprio"}, "1 transmit queues"),
        (ALL, VETH, {"qdisc": "htb"}, "give --rate"),
        (ALL, replace(CARD, tx_queues=MAX_QUEUES + 1), {}, "transmit queues"),
    ],
)
def test_what_fits_nothing(
    features: KernelFeatures, device: Device, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(FeatureMissing) as raised:
        chosen(features, device, **settings)
    assert said in str(raised.value)


def test_the_kernel_is_asked_only_without_a_rate() -> None:
    def never() -> KernelFeatures:
        raise AssertionError

    choose(LinkSettings("eth0", 10**9), CARD, never)


@pytest.mark.parametrize(
    "settings",
    [
        {"rate_bps": 10**9, "qdisc": "ets"},
        {"rate_bps": 10**9, "default_share": 0.0},
        {"qdisc": "ets", "default_share": 0.0},
        {"qdisc": "htb", "default_share": 0.0},
        {"qdisc": "fq"},
        {"classifier": "flower"},
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LinkSettings("eth0", **settings)


def trees(queues: int, **settings: Any) -> Any:
    device = replace(CARD, tx_queues=queues)
    bands = mapped_bands(all_bands())
    return tree_for(choose(LinkSettings("eth0", **settings), device, lambda: ALL), device, bands)


@pytest.mark.parametrize("queues", [1, 2, 64, MAX_QUEUES])
@pytest.mark.parametrize("settings", [{}, {"default_share": 0.0}])
def test_every_handle_is_used_once_and_is_no_one_elses(
    queues: int, settings: dict[str, Any]
) -> None:
    tree = trees(queues, **settings)
    handles = [tree.handle, *(queue.handle for queue in tree.queues)]
    assert len(set(handles)) == len(handles)
    assert all(0 < handle < 0x80000000 and handle & 0xFFFF == 0 for handle in handles)
    parents = [queue.parent for queue in tree.queues]
    assert len(set(parents)) == len(parents)
    assert isinstance(tree.root, Mq) is (queues > 1)
    known = {tree.handle}
    for queue in tree.queues:  # parents first
        assert queue.parent & 0xFFFF0000 in known
        known.add(queue.handle)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.9])
def test_the_quanta_are_the_share_and_fit_the_kernel(share: float) -> None:
    root = trees(1, default_share=share).root
    assert isinstance(root, Ets)
    assert share_of(root) == pytest.approx(share, rel=1e-4)
    assert min(root.quanta) == 65536 or max(root.quanta) == MAX_QUANTUM_BYTES
    assert 1514 < min(root.quanta) <= max(root.quanta) <= MAX_QUANTUM_BYTES
    assert trees(1, default_share=share_of(root)).root == root


def test_lanes_are_mapped_from_priorities_that_need_a_privilege() -> None:
    ets, prio, card = trees(1).root, trees(1, default_share=0.0).root, trees(8, qdisc="mqprio").root
    assert isinstance(ets, Ets)
    assert isinstance(prio, Prio)
    assert isinstance(card, Mqprio)
    lanes = slice(FIRST_MAPPED, FIRST_MAPPED + 6)
    assert FIRST_MAPPED > 6
    assert (set(ets.priomap[lanes]), set(ets.priomap[:FIRST_MAPPED])) == ({0}, {1})
    assert (prio.priomap[lanes], set(prio.priomap[:FIRST_MAPPED])) == ((0, 1, 2, 3, 4, 5), {6})
    assert (card.priomap[lanes], set(card.priomap[:FIRST_MAPPED])) == ((6, 5, 4, 3, 2, 1), {0})
    assert [band.classid for band in mapped_bands(all_bands())] == [8, 9, 10, 11, 12, 13, 0]


def test_bounds_of_queues() -> None:
    assert leaf_limit_bytes(10**8) == 2**20
    assert leaf_limit_bytes(10**11) == 10**8
    assert leaf_limit_bytes(None) == leaf_limit_bytes(10**10)
    leaf = trees(1).queues[-1].options
    assert isinstance(leaf, Bfifo)
    assert leaf.limit_bytes == leaf_limit_bytes(10**10)
