"""What the classifier takes from a link's throughput: iperf3 over a veth that nothing shapes.

Only the classifier is on the link, no tree: runs with and without it take turns, and each pair of
neighbours gives a ratio, so that what else the machine does meanwhile falls on both alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.record import spread
from tests import netns
from tests.cgrouptree import eventually
from tlsched.bands import all_bands
from tlsched.ebpf import program
from tlsched.tc.changes import Change, DelClsact, SetFilter
from tlsched.tc.kernel import Kernel
from tlsched.tc.observed import FILTER_HANDLE, FILTER_PRIO, NAME_OWNER

SECONDS = 2
PORT = "5201"
# The lane's code point makes the classifier look at all that it ever looks at.
CLIENT = ("--time", str(SECONDS), "--tos", str(all_bands()[0].tos), "--json")


def measure(rounds: int) -> list[dict[str, Any]]:
    """Two rows, without and with; ``of_without`` is the spread of the pairs' ratios."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    with _link() as pair, program.load(all_bands()) as classifier:
        _gbit_s(pair)  # the first run after a start is slower
        for number in range(rounds):
            for present in (False, True) if number % 2 else (True, False):
                if present:
                    pair.a.call(_apply, pair.a.dev, _ADD, classifier.fd)
                rates[present].append(_gbit_s(pair))
                if present:
                    pair.a.call(_apply, pair.a.dev, DelClsact())
    ratios = [after / before for before, after in zip(rates[False], rates[True], strict=True)]
    named = {"bench": "classifier", "what": "throughput"}
    rows = [named | {"classifier": each, "gbit_s": spread(rates[each])} for each in (False, True)]
    return [rows[0], rows[1] | {"of_without": spread(ratios)}]


_ADD = SetFilter(NAME_OWNER, FILTER_PRIO, FILTER_HANDLE, add_clsact=True)


@contextmanager
def _link() -> Iterator[netns.Pair]:
    """Two namespaces joined by a veth, and an iperf3 server in the second."""
    pair = netns.make_pair()
    try:
        pair.b.popen("iperf3", "--server", "--port", PORT, "--logfile", "/dev/null")
        listening = partial(pair.b.run, "ss", "-Hltn", f"sport = :{PORT}")
        eventually(lambda: listening().stdout != "", "iperf3 listens")
        yield pair
    finally:
        for end in (pair.a, pair.b):
            netns.remove(end.name)


def _apply(iface: str, change: Change, program_fd: int | None = None) -> None:
    with Kernel() as kernel:
        kernel.apply(change, kernel.read(iface), program_fd)


def _gbit_s(pair: netns.Pair) -> float:
    """What arrives of one TCP flow."""
    client = ("iperf3", "--client", pair.b.v4, "--port", PORT, *CLIENT)
    result = json.loads(pair.a.run(*client).stdout)
    return float(result["end"]["sum_received"]["bits_per_second"]) / 1e9
