"""tlsched@.service under a real systemd and udev: start, reload, stop, interfaces come and go."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests import cgrouptree
from tests.kernel.hostcli import snapshot, state, status
from tests.kernel.systemd_host import CHECKOUT, SystemdHost, booted

pytestmark = pytest.mark.root

TLSCHED = "/opt/tlsched/bin/tlsched"
UNIT = "/etc/systemd/system/tlsched@.service"
CONFIG = "/etc/tlsched/tlsched.toml"
_serial = itertools.count()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdHost]:
    with booted(tmp_path_factory.mktemp("systemd")) as host:
        host.run(TLSCHED, "install-unit")
        host.run("systemctl", "daemon-reload")
        yield host


@dataclass(frozen=True)
class Link:
    """An interface of the host, and its unit."""

    host: SystemdHost
    dev: str

    @property
    def unit(self) -> str:
        named = self.host.run("systemd-escape", "--template=tlsched@.service", self.dev)
        return named.stdout.strip()

    def make(self) -> None:
        # With several queues, as a card has: then its driver is asked how many it uses.
        queues = ("numtxqueues", "2", "numrxqueues", "2")
        self.host.run(
            "ip", "link", "add", self.dev, *queues, "type", "veth", "peer", "name", "peer"
        )
        self.host.run("ip", "link", "set", self.dev, "addrgenmode", "none", "up")

    def remove(self) -> None:
        self.host.run("ip", "link", "delete", self.dev)

    def configure(self, *lines: str) -> None:
        self.host.write(CONFIG, "\n".join([f'[link."{self.dev}"]', *lines, ""]))

    def drop_in(self, line: str) -> None:
        self.host.write(f"/etc/systemd/system/{self.unit}.d/test.conf", f"[Service]\n{line}\n")
        self.host.run("systemctl", "daemon-reload")

    def systemctl(self, verb: str, code: int = 0) -> None:
        done = self.host.run("systemctl", verb, self.unit, check=False)
        assert (done.returncode != 0) == (code != 0), f"{done.stderr}{self.host.journal(self.unit)}"

    @property
    def rate_bps(self) -> int | None:
        return status(self.host, self.dev)[0].rate_bps


@contextlib.contextmanager
def made_link(host: SystemdHost, dev: str, configured: bool = True) -> Iterator[Link]:
    link = Link(host, dev)
    link.make()
    try:
        if configured:
            link.configure('rate = "1gbit"')
        yield link
    finally:
        link.remove()  # which stops the unit
        host.run("systemctl", "disable", link.unit)


@pytest.fixture
def link(host: SystemdHost) -> Iterator[Link]:
    with made_link(host, f"veth{next(_serial)}") as link:
        yield link


def classifier(link: Link) -> str:
    """The filter's line, with the number of its program."""
    shown = link.host.run("tc", "filter", "show", "dev", link.dev, "egress").stdout
    assert " id " in shown
    return shown


def test_start_reload_stop(link: Link) -> None:
    host, before = link.host, snapshot(link.host, link.dev)
    link.systemctl("start")
    assert host.state(link.unit) == "active"
    assert (state(host, link.dev), link.rate_bps) == ("attached", 10**9)
    cgroup = host.run("systemctl", "show", "-P", "ControlGroup", link.unit).stdout
    assert cgroup.strip() == "", "nothing of the unit runs"

    program = classifier(link)
    link.configure('rate = "2gbit"')
    link.systemctl("reload")
    assert (state(host, link.dev), link.rate_bps) == ("attached", 2 * 10**9)
    assert classifier(link) == program, "changed in place"

    attached = snapshot(host, link.dev)
    link.configure('rat = "3gbit"')
    link.systemctl("reload", code=1)
    known = 'the key "rat" is not known; did you mean "rate"?'
    assert f"error: {CONFIG}, [link.{link.dev}]: {known}" in host.journal(link.unit)
    host.run("systemctl", "daemon-reexec")  # systemd itself, as when it is updated
    assert host.state(link.unit) == "active"
    assert snapshot(host, link.dev) == attached

    link.systemctl("stop")
    assert host.state(link.unit) == "inactive"
    assert snapshot(host, link.dev) == before


def test_an_interface_removed_and_made_again(host: SystemdHost) -> None:
    """Its name has all that systemd escapes, or TOML wants in quotes."""
    with made_link(host, "wan-1_@.100") as link:
        link.systemctl("enable")
        link.systemctl("start")
        assert state(host, link.dev) == "attached"
        link.remove()
        host.await_state(link.unit, "inactive")
        link.make()
        host.await_state(link.unit, "active")
        assert state(host, link.dev) == "attached"


def test_an_interface_that_is_back_before_its_unit_has_stopped(link: Link) -> None:
    link.systemctl("enable")
    link.systemctl("start")
    for _ in range(2):
        link.remove()
        link.make()
        cgrouptree.eventually(lambda: state(link.host, link.dev) == "attached", "attached again")
        link.host.await_state(link.unit, "active")
    link.systemctl("stop")
    assert state(link.host, link.dev) == "detached"
    link.systemctl("restart")
    assert link.host.state(link.unit) == "active"
    device = link.host.run(
        "systemd-escape", "--suffix=device", f"sys/subsystem/net/devices/{link.dev}"
    )
    assert link.host.state(device.stdout.strip()) == "active"


def test_the_unit_fails_without_a_section(link: Link) -> None:
    link.host.write(CONFIG, '[link.other]\nrate = "1gbit"\n')
    link.systemctl("start", code=1)
    assert link.host.state(link.unit) == "failed"
    assert f"no section [link.{link.dev}]" in link.host.journal(link.unit)
    assert state(link.host, link.dev) == "detached"


def test_the_unit_fails_where_somebody_elses_qdisc_is(link: Link) -> None:
    link.host.run("tc", "qdisc", "add", "dev", link.dev, "root", "pfifo", "limit", "77")
    before = snapshot(link.host, link.dev)
    link.systemctl("start", code=1)
    assert link.host.state(link.unit) == "failed"
    assert "a root qdisc of somebody else's (pfifo" in link.host.journal(link.unit)
    assert snapshot(link.host, link.dev) == before


def test_the_unit_fails_when_attach_did_not_last(link: Link) -> None:
    """As when a network manager rewrites the link right behind attach: nothing of ours is left."""
    meddle = f"/usr/sbin/tc qdisc replace dev {link.dev} root pfifo"
    link.drop_in(f"ExecStart={meddle}")
    link.systemctl("start", code=1)
    assert link.host.state(link.unit) == "failed"
    said = link.host.journal(link.unit)
    assert "drifted" in said
    assert "pfifo" in said
    left = snapshot(link.host, link.dev)
    assert "pfifo" in left["qdisc"]
    assert "clsact" not in left["qdisc"]
    assert state(link.host, link.dev) == "detached"


@pytest.mark.parametrize("capability", ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"])
def test_each_capability_is_needed(link: Link, capability: str) -> None:
    """Without one of them the classifier is not there, and the log says why."""
    link.drop_in(f"CapabilityBoundingSet=~{capability}")
    link.host.run("systemctl", "start", link.unit, check=False)
    assert "CAP_" in link.host.journal(link.unit)
    assert status(link.host, link.dev)[0].classifier != "bpf"


def test_the_unit_holds_what_it_needs_and_no_more(host: SystemdHost) -> None:
    host.run("systemd-analyze", "verify", UNIT)
    host.run("systemd-analyze", "verify", "tlsched@eth0.service")
    # Exits with an error above the threshold, which is in tenths.
    rated = host.run("systemd-analyze", "security", "--offline=yes", "--threshold=40", UNIT).stdout
    (exposure,) = re.findall(r"Overall exposure level.*?: ([0-9.]+)", rated)
    assert float(exposure) <= 4.0


def test_the_lines_of_the_readme(host: SystemdHost) -> None:
    """From `tlsched install-unit` to a running unit, as they stand there."""
    blocks = re.findall(r"```sh\n(.*?)```", (CHECKOUT / "README.md").read_text(), re.DOTALL)
    (lines,) = (block for block in blocks if "install-unit" in block)
    host.run("rm", "-r", UNIT, CONFIG)
    with made_link(host, "eth0", configured=False) as link:
        host.run("ln", "-sf", TLSCHED, "/usr/local/bin/tlsched")
        said = host.run("sh", "-euc", lines).stdout
        assert "Active: active (exited)" in said
        assert link.rate_bps == 10**10


def test_installing_again_keeps_unit_and_configuration(host: SystemdHost) -> None:
    host.write(CONFIG, '[link.eth0]\nrate = "1gbit"\n')
    said = host.run(TLSCHED, "install-unit").stdout
    assert f"{UNIT}: unchanged\n{CONFIG}: kept\n" in said
    dry = host.run(TLSCHED, "install-unit", "--root", "/tmp/image", "--dry-run").stdout
    assert "ExecStart=/opt/tlsched/bin/tlsched attach" in dry
    host.run("test", "!", "-e", "/tmp/image")
    nobody = ("setpriv", "--reuid=65534", "--clear-groups", TLSCHED, "install-unit")
    done = host.run(*nobody, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "error: only root may install a unit; run it as root\n",
    )
