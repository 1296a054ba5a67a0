"""On a kernel that has neither ets nor prio."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kernel.hostcli import attach, snapshot, tlsched
from tests.kernel.trees import DEV, KINDS, features, link_for
from tests.netns import Namespace
from tlsched.errors import FeatureMissing

pytestmark = pytest.mark.root


def test_a_kernel_with_htb_alone_asks_for_a_rate(make_netns: Callable[[], Namespace]) -> None:
    if features().ets or features().prio:
        pytest.skip("kernel lacks nothing: this is about one without ets and prio")
    host, _ = link_for(KINDS["htb"], make_netns)
    before = snapshot(host, DEV)
    with pytest.raises(FeatureMissing, match="give --rate"):
        attach(host, DEV, rate=None)
    for qdisc in ("ets", "prio", "mqprio"):
        said = tlsched(host, "attach", "--iface", DEV, "--qdisc", qdisc, code=2).stderr
        assert f"the kernel lacks the qdisc {qdisc}" in said
    assert snapshot(host, DEV) == before
