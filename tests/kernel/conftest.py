"""One compiled classifier for tests that attach many times."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tlsched.bands import Band
from tlsched.ebpf import program

Load = Callable[..., program.Classifier]


@pytest.fixture(scope="session")
def load_once() -> Iterator[Load]:
    """Loads as :func:`tlsched.ebpf.program.load` does, but each kind of classifier once."""
    load = program.load
    loaded: dict[tuple[Any, ...], program.Classifier] = {}
    with contextlib.ExitStack() as stack:

        def again(bands: Sequence[Band], *more: Any, **named: Any) -> program.Classifier:
            key = (tuple(bands), tuple(named.items()))
            if key not in loaded:
                loaded[key] = stack.enter_context(load(bands, *more, **named))
            return program.Classifier(os.dup(loaded[key].fd))

        yield again


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch, load_once: Load) -> None:
    """Every load gives the one real program, so that 50 attaches need not compile 50 times."""
    monkeypatch.setattr(program, "load", load_once)
