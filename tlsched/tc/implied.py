"""The tree that a link was attached as, from what is left of it. Pure. There is no state file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from tlsched.bands import DEFAULT_DSCPS, Band, all_bands, mapped_bands
from tlsched.tc.observed import Observed
from tlsched.tc.options import Bfifo, Htb, Mqprio
from tlsched.tc.strict import card_tree, share_of, strict_tree
from tlsched.tc.tree import Tree, desired_tree

T = TypeVar("T")


def bands_for(kind: str, bands: Sequence[Band]) -> tuple[Band, ...]:
    """``bands`` as the classifier has to lead into a tree whose root is of ``kind``."""
    return tuple(bands) if kind == Htb.kind else mapped_bands(bands)


def implied_tree(observed: Observed) -> Tree | None:
    """The tree that ``observed`` was attached as, or None when too little of it is left.

    What most of its parts agree on is taken for what all were given.
    """
    root = observed.root
    if root is None or not observed.has_our_root:
        return None
    bands = all_bands(DEFAULT_DSCPS)  # the tree does not depend on the code points
    if isinstance(root.options, Htb):
        return _implied_htb(observed, bands)
    if isinstance(root.options, Mqprio):
        return card_tree(sum(count for count, _ in root.options.queues), bands)
    limits = [q.options.limit_bytes for q in observed.qdiscs if isinstance(q.options, Bfifo)]
    # An mq's own options have no share, those of its queues have.
    tops = (root, *observed.under(root))
    shares = [share for top in tops if (share := share_of(top.options)) is not None]
    if not limits or not shares:
        return None
    return strict_tree(_most(shares), _most(limits), observed.tx_queues, bands)


def guaranteed_share(tree: Tree) -> float | None:
    """The part of the link that the default band gets at least; None where the card decides."""
    if tree.classes:
        return tree.classes[-1].rate_bps / tree.classes[0].rate_bps
    tops = [tree.root, *(queue.options for queue in tree.queues[:1])]
    # Quanta are whole bytes: what they give is near the share that was asked for.
    return next((round(share, 4) for top in tops if (share := share_of(top)) is not None), None)


def _implied_htb(observed: Observed, bands: Sequence[Band]) -> Tree | None:
    """The rate is what most classes have as their ceil, the share the default's own rate."""
    if not observed.classes:
        return None
    rate_bps = _most([item.ceil_bps for item in observed.classes])
    own = [item.rate_bps for item in observed.classes if item.classid == bands[-1].classid]
    return desired_tree(rate_bps, own[0] if own else rate_bps, bands)


def _most(values: Sequence[T]) -> T:
    return Counter(values).most_common(1)[0][0]
