"""One compiled classifier for tests that attach many times."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tlsched.bands import Band
from tlsched.ebpf import program


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every load gives the one real program, so that 50 attaches need not compile 50 times."""
    load = program.load
    loaded: dict[tuple[Any, ...], program.Classifier] = {}
    with contextlib.ExitStack() as stack:

        def again(bands: Sequence[Band], *more: Any, **named: Any) -> program.Classifier:
            key = (tuple(bands), tuple(named.items()))
            if key not in loaded:
                loaded[key] = stack.enter_context(load(bands, *more, **named))
            return program.Classifier(os.dup(loaded[key].fd))

        monkeypatch.setattr(program, "load", again)
        yield
