"""What classifies a link's packets: the BPF program, or where that cannot be, u32 filters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlsched.bands import Band
from tlsched.config import LinkSettings
from tlsched.errors import FeatureMissing, PermissionMissing
from tlsched.tc import u32
from tlsched.tc.probe import probe
from tlsched.trust import ANY_LOCAL

if TYPE_CHECKING:
    from tlsched.ebpf.program import Classifier
    from tlsched.ebpf.trustmaps import HeldTrust

DSCP_ALONE = "u32 filters classify: the DSCP alone decides, SO_PRIORITY is not checked"


@dataclass(frozen=True, slots=True)
class LinkClassifier:
    """The loaded ``program``, or else the ``matches`` of u32 filters, and what to say of it."""

    program: Classifier | None
    matches: tuple[u32.Match, ...] = ()
    notes: tuple[str, ...] = ()


@contextmanager
def prepared(
    settings: LinkSettings, bands: Sequence[Band], trust: HeldTrust, kind: str, *, ethernet: bool
) -> Iterator[LinkClassifier]:
    """The classifier for a tree whose root is of ``kind``, loaded as long as this is open.

    Raises PermissionMissing or FeatureMissing where what was asked for cannot be.
    """
    from tlsched.ebpf import program

    if settings.classifier == "u32":
        yield LinkClassifier(None, _matches(bands, kind), (DSCP_ALONE,))
        return
    try:
        loaded = program.load(bands, trust, ethernet=ethernet)
    except (FeatureMissing, PermissionMissing) as error:
        # Filters cannot tell who sent a packet, and so not whether he is trusted.
        if settings.classifier == "bpf" or settings.trust != ANY_LOCAL:
            raise
        yield LinkClassifier(None, _matches(bands, kind), (error.message, DSCP_ALONE))
        return
    with loaded:
        yield LinkClassifier(loaded)


def _matches(bands: Sequence[Band], kind: str) -> tuple[u32.Match, ...]:
    features = probe()
    if not features.u32:
        raise FeatureMissing(
            "the kernel lacks the filter u32 (CONFIG_NET_CLS_U32)", hint="use --classifier bpf"
        )
    if not features.skbedit and kind != "htb":
        raise FeatureMissing(
            "the kernel lacks skbedit (CONFIG_NET_ACT_SKBEDIT), so u32 can only lead into an htb",
            hint="give --rate, or use --classifier bpf",
        )
    return u32.matches(bands, at_htb=not features.skbedit)
