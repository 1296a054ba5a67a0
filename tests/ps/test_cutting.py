"""How sums are cut: all of it, once, evenly, the same on all workers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tlsched.shim.ps.cutting import SEGMENT_BYTES, SMALL_BYTES, cut


@given(
    items=st.integers(1, 5_000_000),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    servers=st.integers(1, 70),
    number=st.integers(0, 10_000),
)
def test_segments_cover_a_sum_in_whole_items(
    items: int, item_bytes: int, servers: int, number: int
) -> None:
    total = items * item_bytes
    segments = cut(total, item_bytes, servers, number)
    assert [one.start for one in segments] == [0, *(one.stop for one in segments[:-1])]
    assert segments[-1].stop == total
    for one in segments:
        assert 0 < one.stop - one.start <= SEGMENT_BYTES
        assert one.start % item_bytes == 0
        assert 0 <= one.server < servers


@given(items=st.integers(1, 10_000_000), servers=st.integers(1, 16), number=st.integers(0, 100))
def test_a_large_sum_loads_all_servers_alike(items: int, servers: int, number: int) -> None:
    if 4 * items < servers * SMALL_BYTES:
        return
    load = Counter[int]()
    for segment in cut(4 * items, 4, servers, number):
        load[segment.server] += segment.stop - segment.start
    assert len(load) == servers
    assert max(load.values()) - min(load.values()) <= 4 * len(cut(4 * items, 4, servers, number))


def test_small_sums_go_to_one_server_after_the_other() -> None:
    assert [cut(1000, 4, 4, number)[0].server for number in range(6)] == [0, 1, 2, 3, 0, 1]
    assert all(len(cut(1000, 4, 4, number)) == 1 for number in range(6))


def test_a_bucket_of_half_a_megabyte_is_already_under_way_back_while_it_leaves() -> None:
    assert len(cut(512 * 1024, 4, 4, 0)) == 8
