"""Pools of ranks that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.ranks import RankPool

_pools: dict[int, RankPool] = {}


def _pool(size: int) -> RankPool:
    pool = _pools.get(size)
    if pool is None or pool.broken:
        if pool is not None:
            pool.close()
        pool = _pools[size] = RankPool(size)
    return pool


@pytest.fixture
def two_ranks() -> RankPool:
    """Two ranks over loopback."""
    return _pool(2)


@pytest.fixture
def four_ranks() -> RankPool:
    """Four ranks over loopback."""
    return _pool(4)


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    for pool in _pools.values():
        pool.close()
    _pools.clear()
