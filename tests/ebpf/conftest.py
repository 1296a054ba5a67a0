"""One compiled classifier for all tests that only run it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tlsched.bands import all_bands
from tlsched.ebpf import program


@pytest.fixture(scope="session")
def classifier() -> Iterator[program.Classifier]:
    """The classifier with the default marks (needs root)."""
    with program.load(all_bands()) as loaded:
        yield loaded
