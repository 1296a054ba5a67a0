"""Warnings that point at the line of the user's that they are about."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

# Code that stands between the user's line and a warning: tlsched's and torch's.
_BETWEEN = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], *torch.__path__))
_CONTEXTLIB = contextlib.__file__


def tell(text: str) -> None:
    """Warn of ``text`` at the innermost line that is neither tlsched's nor torch's."""
    frame = sys._getframe()
    level = 1
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(f"tlsched: {text}", stacklevel=level)


def _is_between(file: str) -> bool:
    return file.startswith(_BETWEEN) or file == _CONTEXTLIB
