"""`tlsched doctor` on real links: what it finds, and that it changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kernel.hostcli import TLSCHED, attach, snapshot, tlsched, tlsched_json
from tests.netns import Namespace, Pair
from tlsched.config import parse_rate
from tlsched.doctor import dcb, examine, managers, sysfs
from tlsched.doctor.finding import Finding
from tlsched.doctor.links import Link, read_links
from tlsched.ebpf import compiler, libbpf
from tlsched.tc.changes import SetFilter
from tlsched.tc.kernel import Kernel
from tlsched.tc.probe import probe

pytestmark = pytest.mark.root

NO_CAPABILITY = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--")
CILIUM_C = "#include <uapi/linux/bpf.h>\nint cil_to_netdev(struct __sk_buff *skb) { return -1; }\n"
TCX_EGRESS = 47  # BPF_TCX_EGRESS


def doctor(where: Namespace, dev: str, rate: str | None = None) -> list[Finding]:
    """The findings, from this process: no second interpreter to start."""
    return where.call(examine, dev, None if rate is None else parse_rate(rate))


def of_link(found: list[Finding], words: str) -> Finding:
    """The one finding about an interface that has these words."""
    (finding,) = [item for item in found if item.about != "host" and words in item.what]
    return finding


def link_of(where: Namespace, dev: str) -> Link:
    return next(link for link in where.call(read_links) if link.iface == dev)


def test_a_link_that_is_fit(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    before = snapshot(host, dev)
    found = doctor(host, dev, "1gbit")
    assert {finding.level for finding in found} <= {"ok", "note"}
    assert of_link(found, "nothing stands in the way of attach").level == "ok"
    grain = of_link(found, "GSO 65536 bytes at 1gbit")
    assert (grain.level, grain.what.split(" us ")[0].split()[-1]) == ("ok", "524")
    assert snapshot(host, dev) == before


def test_one_finding_a_line_in_columns(netns_pair: Pair) -> None:
    argv = ("doctor", "--iface", netns_pair.a.dev, "--rate", "10mbit")
    found = tlsched_json(netns_pair.a, *argv)
    lines = tlsched(netns_pair.a, *argv).stdout.splitlines()
    assert len(lines) == len(found)
    for line, finding in zip(lines, found, strict=True):
        assert line.split()[:2] == [finding["level"], finding["about"]]
        assert line.index(finding["what"]) == 15
        assert line.endswith(finding["remedy"] or finding["what"])


def test_without_an_interface_only_physical_ones_are_looked_at(netns_pair: Pair) -> None:
    assert {finding.about for finding in netns_pair.a.call(examine)} == {"host"}


def test_an_attached_link_goes_by_its_own_rate(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev, "250mbit")
    found = doctor(host, dev)
    assert of_link(found, "at 250mbit").level == "note"
    assert of_link(found, "attaching again would change nothing").level == "ok"


def test_a_drifted_link_is_named(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    attach(host, dev)
    for classid in ("7150:1", "7150:16"):
        host.run("tc", "class", "change", "dev", dev, "classid", classid, "htb", "rate", "5mbit")
    finding = of_link(doctor(host, dev), "it drifted: ")
    assert finding.level == "warning"
    assert "more" in finding.what


def test_a_smaller_packet_is_a_finer_grain(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    long = of_link(doctor(host, dev, "100mbit"), "waits 5243 us")
    assert long.remedy == f"ip link set dev {dev} gso_max_size 16384"
    host.run(*long.remedy.split())
    of_link(doctor(host, dev, "100mbit"), "waits 1311 us")


def test_a_root_of_somebody_elses_is_a_blocker(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    host.run("tc", "qdisc", "add", "dev", dev, "root", "handle", "9:", "pfifo", "limit", "100")
    before = snapshot(host, dev)
    finding = of_link(doctor(host, dev, "1gbit"), "pfifo 9:")
    assert finding.level == "blocker"
    assert "--replace-root" in finding.remedy
    assert snapshot(host, dev) == before


def test_without_a_capability_it_says_what_it_could_not_do(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    argv = ("doctor", "--iface", dev, "--rate", "1gbit")
    done = host.run(*NO_CAPABILITY, *TLSCHED, *argv, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "CAP_NET_ADMIN is missing" in done.stdout
    assert "CAP_BPF is missing" in done.stdout
    assert "whether the kernel loads the classifier could not be tried" in done.stdout


def test_bad_input(netns_pair: Pair) -> None:
    assert "no interface" in tlsched(netns_pair.a, "doctor", "--iface", "nope", code=2).stderr
    assert "rate" in tlsched(netns_pair.a, "doctor", "--rate", "fast", code=2).stderr


# --- Who else is at work on the link -------------------------------------------------------


@contextmanager
def cilium_program(tmp_path: Path) -> Iterator[int]:
    """A program with the name of Cilium's, loaded: its descriptor."""
    source = tmp_path / "cilium.c"
    source.write_text(CILIUM_C)
    with compiler.compiled(source, "test program") as module:
        fd = module.load("cil_to_netdev", compiler.ProgramType.SCHED_CLS)
    try:
        yield fd
    finally:
        os.close(fd)


def test_ciliums_filter_comes_before_ours(netns_pair: Pair, tmp_path: Path) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev

    def put(fd: int) -> None:
        with Kernel() as kernel:
            change = SetFilter("cil_to_netdev-eth0", prio=1, handle=1, add_clsact=True)
            kernel.apply(change, kernel.read(dev), fd)

    with cilium_program(tmp_path) as fd:
        host.call(put, fd)
    finding = of_link(doctor(host, dev, "1gbit"), "cil_to_netdev-eth0")
    assert finding.level == "warning"
    assert "Cilium" in finding.what
    assert finding.remedy == "cilium config set bpf-filter-priority 29009"


def test_a_tcx_program_comes_before_every_filter(netns_pair: Pair, tmp_path: Path) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev

    def put(fd: int) -> int:
        ifindex = socket.if_nametoindex(dev)
        return int(libbpf._library().bpf_prog_attach(fd, ifindex, TCX_EGRESS, 0))

    with cilium_program(tmp_path) as fd:
        if host.call(put, fd) < 0:
            pytest.skip("kernel lacks tcx")
    finding = of_link(doctor(host, dev, "1gbit"), "(tcx)")
    assert finding.level == "warning"
    assert "cil_to_netdev" in finding.what
    assert "enable-tcx" in finding.remedy


def test_a_harmless_filter_of_anybody_is_a_note(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    host.run("tc", "qdisc", "add", "dev", dev, "clsact")
    theirs = f"filter add dev {dev} egress prio 3 protocol ip u32 match u32 0 0 flowid 1:1"
    host.run("tc", *theirs.split())
    finding = of_link(doctor(host, dev, "1gbit"), "the filter u32 (prio 3)")
    assert finding.level == "note"


NETWORKD_STATE = """# This is private data. Do not parse.
ADMIN_STATE={state}
OPER_STATE=routable
NETWORK_FILE=/etc/systemd/network/10-eth.network
"""


@contextmanager
def process_called(name: str, where: Namespace, tmp_path: Path) -> Iterator[None]:
    """A real process of that name in a namespace."""
    program = tmp_path / name
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    with where.popen(str(program), "60") as process:
        comm = Path(f"/proc/{process.pid}/comm")
        while comm.read_text().strip() != name[:15]:
            assert process.poll() is None
        try:
            yield
        finally:
            process.kill()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def managed(host: Namespace, link: Link, root: Path) -> list[Finding]:
    return host.call(lambda: list(managers.findings(link, root)))


def test_network_manager_counts_where_it_runs(netns_pair: Pair, tmp_path: Path) -> None:
    host, link = netns_pair.a, link_of(netns_pair.a, netns_pair.a.dev)
    state = tmp_path / "run/NetworkManager/devices" / str(link.ifindex)
    write(state, "[device]\nmanaged=true\nconnection-uuid=1\n")
    assert managed(host, link, tmp_path) == []  # what it left when it was stopped
    with process_called("NetworkManager", netns_pair.b, tmp_path):
        assert managed(host, link, tmp_path) == []  # its link of that number is another one
    with process_called("NetworkManager", host, tmp_path):
        (finding,) = managed(host, link, tmp_path)
        assert finding.level == "warning"
        assert finding.remedy.startswith("nmcli device set eth0 managed no")
        write(state, "[device]\nmanaged=false\n")
        assert managed(host, link, tmp_path) == []


def test_networkd_is_worse_when_it_sets_a_qdisc(netns_pair: Pair, tmp_path: Path) -> None:
    host, link = netns_pair.a, link_of(netns_pair.a, netns_pair.a.dev)
    state = tmp_path / "run/systemd/netif/links" / str(link.ifindex)
    network = tmp_path / "etc/systemd/network/10-eth.network"
    write(network, "[Match]\nName=eth0\n\n[Network]\nDHCP=yes\n")
    with process_called("systemd-networkd", host, tmp_path):
        write(state, NETWORKD_STATE.format(state="unmanaged"))
        assert managed(host, link, tmp_path) == []
        write(state, NETWORKD_STATE.format(state="configured"))
        (finding,) = managed(host, link, tmp_path)
        assert finding.level == "note"
        dropin = network.with_name("10-eth.network.d") / "qdisc.conf"
        write(dropin, "[CAKE]\nParent=root\nBandwidth=1G\n")
        (finding,) = managed(host, link, tmp_path)
    assert finding.level == "warning"
    assert "section [CAKE]" in finding.what


# --- What the device is ------------------------------------------------------------------


def test_queues_are_those_of_this_namespace(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev

    def shown() -> list[str]:
        with sysfs.of_this_namespace() as files:
            assert files is not None
            return files.names("class/net")

    assert set(host.call(shown)) == {name for _, name in host.call(socket.if_nameindex)}
    queues = ["numtxqueues", "4", "numrxqueues", "4"]
    host.run("ip", "link", "add", "many0", *queues, "type", "veth", "peer", "name", "many1")
    finding = of_link(doctor(host, "many0", "1gbit"), "transmit queues")
    assert finding.what.startswith("4 transmit queues")
    found = doctor(host, dev, "1gbit")
    assert not [item for item in found if "transmit queues" in item.what]


def test_without_privilege_sysfs_of_another_namespace_is_not_taken(netns_pair: Pair) -> None:
    """/sys shows the machine's own namespace, and its eth0 is not this one."""
    code = """
from tlsched.doctor import sysfs
with sysfs.of_this_namespace() as files:
    print(files)
"""
    done = netns_pair.a.run(*NO_CAPABILITY, sys.executable, "-c", code)
    assert done.stdout == "None\n"


def test_a_rate_is_asked_for_where_nothing_works_without(netns_pair: Pair) -> None:
    kernel = netns_pair.a.call(probe)
    asked = [item for item in doctor(netns_pair.a, netns_pair.a.dev) if "no speed of" in item.what]
    wanted = [] if kernel.ets or kernel.prio else [("warning", "give --rate")]
    assert [(item.level, item.remedy) for item in asked] == wanted


def test_the_loopback_is_no_place(netns_pair: Pair) -> None:
    assert of_link(doctor(netns_pair.a, "lo"), "loopback").level == "blocker"


def test_what_the_kernel_has_is_said(netns_pair: Pair) -> None:
    found = [item.what for item in doctor(netns_pair.a, netns_pair.a.dev, "1gbit")]
    assert any(what.startswith("the kernel has htb") for what in found)


def test_a_device_on_top_of_another_is_the_wrong_place(netns_pair: Pair) -> None:
    host, dev = netns_pair.a, netns_pair.a.dev
    host.run("ip", "link", "add", "link", dev, "name", "top0", "type", "macvlan")
    found = doctor(host, "top0", "1gbit")
    assert of_link(found, f"a macvlan on top of {dev}").level == "warning"
    assert of_link(found, "it is down").remedy == "ip link set dev top0 up"


def test_a_device_without_dcb_says_nothing_of_dscp(netns_pair: Pair) -> None:
    link = link_of(netns_pair.a, netns_pair.a.dev)
    (finding,) = netns_pair.a.call(lambda: list(dcb.findings(link)))
    assert (finding.level, finding.remedy) == ("note", "")


def test_the_crystallographers_bcc_is_named(netns_pair: Pair, tmp_path: Path) -> None:
    write(tmp_path / "bcc/__init__.py", "")
    write(tmp_path / "bcc-1.0.dist-info/METADATA", "Name: bcc\nVersion: 1.0\nSummary: Crystals\n")
    done = netns_pair.a.run("env", f"PYTHONPATH={tmp_path}", *TLSCHED, "doctor", check=False)
    (line,) = [line for line in done.stdout.splitlines() if "'bcc' 1.0" in line]
    assert line.startswith("note")
    assert line.endswith("pip uninstall bcc")


def test_no_mount_is_left(netns_pair: Pair) -> None:
    def mounts() -> list[str]:
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [line for line in lines if line.split()[2] == "sysfs"]

    before = mounts()
    doctor(netns_pair.a, netns_pair.a.dev, "1gbit")
    assert mounts() == before
