"""Loading and reading: what is left behind, what is missing, which bcc is taken."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import netns
from tests.ebpf import testrun
from tlsched.bands import all_bands
from tlsched.ebpf import abi, compiler, libbpf, maps, program
from tlsched.errors import ConfigError, FeatureMissing, HostError

CLANG_NOISE = "int tlsched(struct __sk_buff *skb) { return no_such_thing; }"


def python(script: str, *wrapper: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter."""
    return subprocess.run(
        [*wrapper, sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60 * netns.SLOWNESS,
        check=False,
        env=os.environ | environment,
    )


def with_capabilities(*names: str) -> tuple[str, ...]:
    """A command prefix that keeps root's user id and only these capabilities."""
    kept = ",".join(["-all", *(f"+{name}" for name in names)])
    return ("setpriv", "--bounding-set", kept, "--inh-caps", "-all")


@pytest.mark.root
def test_marks_can_be_read_back() -> None:
    dscps = (46, 1, 2, 3, 4, 63)
    with program.load(all_bands(dscps)) as loaded:
        marks = maps.read_marks(loaded.program_id)
    assert [mark.dscp for mark in marks] == [*dscps, None]
    assert [mark.priority for mark in marks] == [6, 5, 4, 3, 2, 1, None]
    assert [mark.classid for mark in marks] == [band.classid for band in all_bands()]
    assert [mark.band for mark in marks] == [band.name for band in all_bands()]


@pytest.mark.root
def test_other_dscps_lead_to_the_lanes() -> None:
    from tests.ebpf.frames import IPV4, ethernet, ipv4

    bands = all_bands((46, 1, 2, 3, 4, 63))
    with program.load(bands) as loaded:
        asked = testrun.run(loaded.fd, ethernet(ipv4(63), IPV4), priority=1)
        former = testrun.run(loaded.fd, ethernet(ipv4(40), IPV4), priority=6)
    assert (asked.priority, former.priority) == (bands[5].classid, 6)


@pytest.mark.stock_kernel
@pytest.mark.root
def test_the_kernel_names_the_program_as_we_do(classifier: program.Classifier) -> None:
    info = Path(f"/proc/self/fdinfo/{classifier.fd}").read_text().split()
    assert info[info.index("prog_tag:") + 1] == classifier.tag
    assert int(info[info.index("prog_id:") + 1]) == classifier.program_id
    assert classifier.name == abi.PROGRAM_NAME


@pytest.mark.root
def test_loading_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    fds, cwd = set(os.listdir("/proc/self/fd")), Path.cwd()
    environment = dict(os.environ)
    with program.load(all_bands()) as loaded:
        assert loaded.fd >= 0
        assert not os.get_inheritable(loaded.fd)
    assert dict(os.environ) == environment
    assert set(os.listdir("/proc/self/fd")) == fds
    assert Path.cwd() == cwd
    assert capfd.readouterr() == ("", "")
    with pytest.raises(HostError, match="does not exist"):
        maps.read_counters(loaded.program_id)


@pytest.mark.root
def test_the_users_own_bcc_setting_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "/nowhere")
    with program.load(all_bands()):
        assert os.environ["BCC_KERNEL_SOURCE"] == "/nowhere"


@pytest.mark.stock_kernel
@pytest.mark.root
def test_linux_6_1_asks_for_a_third_capability_and_it_is_named() -> None:
    script = "from tlsched.bands import all_bands; from tlsched.ebpf import program;"
    script += "print(program.load(all_bands()).tag)"
    done = python(script, *with_capabilities("bpf", "net_admin", "perfmon"))
    assert done.returncode == 0, done.stderr
    done = python(script, *with_capabilities("bpf", "net_admin"))
    assert done.returncode == 0 or "asks for CAP_PERFMON too" in done.stderr, done.stderr


@pytest.mark.root
def test_two_capabilities_are_enough() -> None:
    """CAP_BPF and CAP_NET_ADMIN load it; no CAP_PERFMON (on recent kernels), no CAP_SYS_ADMIN."""
    script = """
        from tlsched.bands import all_bands
        from tlsched.ebpf import maps, program
        from tlsched.errors import PermissionMissing
        with program.load(all_bands()) as loaded:
            print(loaded.name)
            try:
                maps.read_counters(loaded.program_id)
            except PermissionMissing as error:
                print(error)
    """
    done = python(script, *with_capabilities("bpf", "net_admin"))
    assert done.returncode == 0, done.stderr
    name, refusal = done.stdout.splitlines()
    assert name == abi.PROGRAM_NAME
    assert "CAP_SYS_ADMIN" in refusal


@pytest.mark.root
@pytest.mark.parametrize("held", [(), ("bpf",), ("net_admin",)], ids=str)
def test_a_missing_capability_is_named(held: tuple[str, ...]) -> None:
    script = """
        from tlsched.bands import all_bands
        from tlsched.ebpf import program
        program.load(all_bands())
    """
    done = python(script, *with_capabilities(*held))
    last = done.stderr.splitlines()[-1]
    assert "PermissionMissing" in last
    assert "CAP_BPF and CAP_NET_ADMIN" in last


@pytest.mark.root
def test_a_compile_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text(CLANG_NOISE)
    monkeypatch.setattr(program, "_SOURCE", broken)
    with pytest.raises(FeatureMissing, match=r"could not compile.*no_such_thing") as caught:
        program.load(all_bands())
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.root
def test_somebody_elses_program_is_not_misread() -> None:
    with _trivial_program() as program_id, pytest.raises(HostError, match="not this version's"):
        maps.read_counters(program_id)


@pytest.mark.stock_kernel
@pytest.mark.root
def test_c_and_python_agree_on_the_maps(classifier: program.Classifier) -> None:
    with libbpf.program_by_id(classifier.program_id) as fd:
        _, map_ids = libbpf.program_info(fd)
    shapes = {}
    for map_id in map_ids:
        with libbpf.map_by_id(map_id) as fd:
            info = libbpf.map_info(fd)
            shapes[info.name.decode()] = (info.key_size, info.value_size, info.max_entries)
    assert shapes == {
        name: (ctypes.sizeof(key), ctypes.sizeof(value), entries)
        for name, (key, value, entries) in abi.SHAPES.items()
    }


def test_bands_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="lane0"):
        program.load(all_bands()[:3])


def test_reading_needs_no_bcc() -> None:
    done = python("import sys, tlsched.ebpf.maps; print([m for m in sys.modules if 'bcc' in m])")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.root
def test_another_bcc_on_the_path_does_not_matter(tmp_path: Path) -> None:
    _lattice_package(tmp_path)
    script = """
        import bcc
        from tlsched.bands import all_bands
        from tlsched.ebpf import program
        with program.load(all_bands()) as loaded:
            print(loaded.name, bcc.LATTICE, bcc.__file__)
    """
    done = python(script, PYTHONPATH=str(tmp_path))
    assert done.stdout.split()[:2] == [abi.PROGRAM_NAME, "True"], done.stderr


@pytest.mark.parametrize(
    ("installed", "expected"),
    [(False, "bcc, the BPF compiler, is missing"), (True, "'bcc' 0.1.10 (N-dim invertible BCC")],
)
def test_no_bcc_and_the_wrong_bcc_are_told_apart(
    installed: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        _lattice_package(tmp_path)
    found = importlib.util.find_spec("bcc")
    if found and str(found.origin).startswith("/usr/lib/python3"):
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    else:
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compiler, "_DEBIAN_PACKAGES", tmp_path / "absent")
    with pytest.raises(FeatureMissing) as caught:
        compiler._import_bcc()
    assert expected in caught.value.message
    assert "apt install python3-bpfcc" in caught.value.hint


def _lattice_package(folder: Path) -> None:
    """A package as PyPI's `bcc` installs it: lattices, not BPF."""
    (folder / "bcc").mkdir()
    (folder / "bcc" / "__init__.py").write_text("LATTICE = True\n")
    metadata = folder / "bcc-0.1.10.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        "Metadata-Version: 2.1\nName: bcc\nVersion: 0.1.10\nSummary: N-dim invertible BCC lattice\n"
    )


@contextlib.contextmanager
def _trivial_program() -> Iterator[int]:
    """Id of a loaded program that is not ours: `return 0` as a socket filter."""
    code = bytes.fromhex("b700000000000000 9500000000000000")
    load = ctypes.CDLL("libbpf.so.1").bpf_prog_load
    socket_filter = 1
    fd = load(socket_filter, b"other", b"GPL", code, ctypes.c_size_t(2), None)
    assert fd >= 0
    try:
        info, _ = libbpf.program_info(fd)
        yield int(info.id)
    finally:
        os.close(fd)
