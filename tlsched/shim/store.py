"""Calls to the ranks' key-value store that always end: bounded in time, and open to Ctrl-C.

The store's server lives in one rank's process or its launcher. If that process is stopped, a call
never returns (torch sets no limit on an answer), so calls run in a thread that can be left behind.
The thread lives as long as the call: nobody polls while training runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StoreError(RuntimeError):
    """The store does not answer: its server has gone or hangs."""


def bounded(call: Callable[[threading.Event], T], limit_s: float) -> T:
    """The result of ``call(given_up)``, or what it raised.

    Raises StoreError when it takes longer than ``limit_s``, or when it fails with a RuntimeError as
    torch's stores do. ``given_up`` is set when nobody waits for the result any more.
    """
    results: list[T] = []
    failures: list[BaseException] = []
    done, given_up = threading.Event(), threading.Event()

    def work() -> None:
        try:
            results.append(call(given_up))
        except BaseException as error:  # raised in the caller's thread
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="tlsched store", daemon=True).start()
    try:
        if not done.wait(limit_s):
            raise StoreError(f"the ranks' store did not answer within {limit_s:g} s")
    finally:
        given_up.set()
    if not failures:
        return results[0]
    try:
        if isinstance(failures[0], RuntimeError):
            raise StoreError(f"the ranks' store does not answer ({failures[0]})") from failures[0]
        raise failures[0]
    finally:
        failures.clear()  # an exception holds its frames, and this frame would hold the exception
