"""How a sum is cut into segments and which server each segment goes to.

A pure function of sizes, so that all workers do the same without a word.
"""

from __future__ import annotations

from typing import NamedTuple

# What a server receives, adds and sends back as a whole: see docs/parameter-servers.md for what
# was measured.
SEGMENT_BYTES = 256 * 1024
# Below this, cutting costs more than the earlier start of the way back gains.
SMALL_BYTES = 64 * 1024
# A large sum is cut this often for each server, if its segments are not too small then: the way
# back is late by one part of so many.
ROUNDS = 4


class Segment(NamedTuple):
    """Bytes ``start`` to ``stop`` of a sum, for server number ``server``."""

    server: int
    start: int
    stop: int


def cut(total: int, item_bytes: int, servers: int, number: int) -> list[Segment]:
    """Sum number ``number`` of its lane, of ``total`` bytes, in whole items.

    A large sum is cut into equal segments whose count is a multiple of ``servers``, dealt out in
    turn: all servers have the same load and a sum comes back from all of them while it still
    leaves. Small ones go to one server, each to the next.
    """
    items = total // item_bytes
    if total < servers * SMALL_BYTES:
        count = max(1, -(-total // SEGMENT_BYTES))
    else:
        size = min(SEGMENT_BYTES, max(SMALL_BYTES, total // (servers * ROUNDS)))
        count = -(-total // (size * servers)) * servers
    bounds = [items * index // count * item_bytes for index in range(count + 1)]
    return [
        Segment((number + index) % servers, bounds[index], bounds[index + 1])
        for index in range(count)
    ]
