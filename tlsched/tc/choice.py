"""Which tree a link gets: what was asked for, and what kernel and device can do. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tlsched.bands import LANE_COUNT, Band
from tlsched.config import LinkSettings, format_rate, share_bps
from tlsched.errors import FeatureMissing
from tlsched.tc.device import Device
from tlsched.tc.probe import KernelFeatures
from tlsched.tc.strict import MAX_QUEUES, card_tree, leaf_limit_bytes, strict_tree
from tlsched.tc.tree import Tree, desired_tree

CARD_CLASSES = LANE_COUNT + 1
UNGUARDED = "nothing is guaranteed to the default band: busy lanes stop all other traffic"
NO_ETS = "the kernel lacks the qdisc ets (CONFIG_NET_SCH_ETS)"
NO_PRIO = "the kernel lacks the qdisc prio (CONFIG_NET_SCH_PRIO)"
# Devices made in software that hand each packet on at once (IFF_NO_QUEUE in the kernel).
WITHOUT_QUEUE = frozenset({"veth", "bridge", "vlan", "macvlan", "dummy", "vxlan"})


@dataclass(frozen=True, slots=True)
class Choice:
    """The root's kind, and what it is set to. ``rate_bps`` (bit/s) is HTB's alone.

    ``share`` is the default band's; ``notes`` say what the administrator should know.
    """

    kind: str
    rate_bps: int | None = None
    share: float = 0.0
    notes: tuple[str, ...] = ()


def choose(settings: LinkSettings, device: Device, ask: Callable[[], KernelFeatures]) -> Choice:
    """The tree for a link. ``ask`` tells what the kernel has; it is called where that matters.

    Raises FeatureMissing where nothing that would do what was asked can work.
    """
    if settings.rate_bps is not None:
        return Choice("htb", settings.rate_bps, settings.share)
    if settings.qdisc == "htb":
        return _at_device_speed(settings, device, ())
    features = ask()
    if settings.qdisc == "mqprio":
        return _on_card(device, features)
    if device.tx_queues > MAX_QUEUES:
        raise FeatureMissing(
            f"{device.iface} has {device.tx_queues} transmit queues, more than {MAX_QUEUES}",
            hint="give --rate, which takes one tree for all of them",
        )
    choice = _strict(settings, device, features)
    if choice.kind != "htb" and device.kind in WITHOUT_QUEUE:
        idle = f"a {device.kind} takes every packet at once, so none waits to be ordered;"
        return Choice(choice.kind, None, choice.share, (*choice.notes, f"{idle} give --rate"))
    return choice


def tree_for(choice: Choice, device: Device, bands: Sequence[Band]) -> Tree:
    """The tree that was chosen."""
    if choice.rate_bps is not None:
        return desired_tree(choice.rate_bps, share_bps(choice.rate_bps, choice.share), bands)
    if choice.kind == "mqprio":
        return card_tree(device.tx_queues, bands)
    limit_bytes = leaf_limit_bytes(device.speed_bps)
    return strict_tree(choice.share, limit_bytes, device.tx_queues, bands)


def _strict(settings: LinkSettings, device: Device, features: KernelFeatures) -> Choice:
    """ets where a share is wanted, prio where none is or none was asked for, else HTB."""
    ets = settings.qdisc in ("auto", "ets") and settings.share > 0
    if ets and features.ets:
        return Choice("ets", None, settings.share)
    without: tuple[str, ...] = (NO_ETS,) if ets else ()
    if settings.qdisc == "ets":
        raise FeatureMissing(NO_ETS, hint="leave --qdisc out, or give --rate")
    content = settings.default_share is None or settings.share == 0 or settings.qdisc == "prio"
    if content and features.prio:
        return Choice("prio", None, 0.0, (*without, UNGUARDED))
    if content:
        without = (*without, NO_PRIO)
    if settings.qdisc == "prio" or settings.share == 0:
        raise FeatureMissing(without[0], hint="give --rate, and a --share")
    return _at_device_speed(settings, device, without)


def _at_device_speed(settings: LinkSettings, device: Device, notes: tuple[str, ...]) -> Choice:
    """HTB with the device's own speed for a rate."""
    if device.speed_bps is None:
        why = "; ".join((*notes, f"{device.iface} has no speed of its own to shape to"))
        raise FeatureMissing(why, hint="give --rate")
    speed = f"no --rate given: shaping to the device's speed, {format_rate(device.speed_bps)}"
    return Choice("htb", device.speed_bps, settings.share, (*notes, speed))


def _on_card(device: Device, features: KernelFeatures) -> Choice:
    if not features.mqprio:
        raise FeatureMissing(
            "the kernel lacks the qdisc mqprio (CONFIG_NET_SCH_MQPRIO)", hint="leave --qdisc out"
        )
    if device.tx_queues < CARD_CLASSES:
        raise FeatureMissing(
            f"{device.iface} has {device.tx_queues} transmit queues, and mqprio needs one for each"
            f" of {CARD_CLASSES} bands",
            hint="leave --qdisc out, or give the card more queues (ethtool -L)",
        )
    return Choice("mqprio", None, 0.0, ("the card orders the bands, by its own settings",))
