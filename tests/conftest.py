"""What all tests share: root is demanded, namespaces are lent, leaks fail the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator

import hypothesis
import pytest

from tests import leaks, netns

NEEDS_ROOT = 'needs root: run `sudo make test`; `pytest -m "not root"` runs the other tests'

# Chance finds faults on a developer's machine; an unattended run must tell the same twice.
hypothesis.settings.register_profile("unattended", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("unattended")


def _demand_root() -> None:
    if os.geteuid() != 0:
        pytest.fail(NEEDS_ROOT, pytrace=False)


def pytest_configure() -> None:
    # Shells start what is in the background with SIGINT ignored, nohup with SIGHUP; all commands
    # that tests end with these would inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-kernel",
        action="store_true",
        help="this kernel has every feature: a test that skips for want of one fails",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root"):
        _demand_root()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A root test that skips is a failure: only a kernel without the feature excuses it.

    With ``--whole-kernel`` nothing does.
    """
    report = yield
    if report.skipped and item.get_closest_marker("root") and not hasattr(report, "wasxfail"):
        reason = str(call.excinfo.value) if call.excinfo else ""
        if "kernel lacks" not in reason or item.config.getoption("--whole-kernel"):
            report.outcome = "failed"
            report.longrepr = (
                'a root test may only skip with a reason "kernel lacks …", and with '
                f"--whole-kernel not at all: {reason}"
            )
    return report


@pytest.fixture(scope="session", autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail the run, naming it, when a namespace, qdisc or program of ours outlives the tests."""
    if os.geteuid() != 0:
        yield
        return
    netns.remove_leftovers()
    before = leaks.observe()
    yield
    left = leaks.left_behind(before)
    if left:
        pytest.fail("left behind by the tests: " + ", ".join(left), pytrace=False)


@pytest.fixture
def make_netns() -> Iterator[Callable[[], netns.Namespace]]:
    """A function that makes an empty namespace; all of them go with the test."""
    _demand_root()
    before = netns.namespaces()
    yield netns.make_namespace
    _remove_new(before)


@pytest.fixture
def netns_pair() -> Iterator[netns.Pair]:
    """Two namespaces joined by a veth, ``.a`` and ``.b``, each with ``dev, v4, v6, mac``."""
    _demand_root()
    before = netns.namespaces()
    try:
        yield netns.make_pair()
    finally:
        _remove_new(before)


def _remove_new(before: set[str]) -> None:
    for name in netns.namespaces() - before:
        if netns.owner_pid(name) == os.getpid():
            netns.remove(name)
