"""The mount table's many shapes (text), and real cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.netns import Namespace
from tlsched import cgroups
from tlsched.cgroups import Mount
from tlsched.errors import ConfigError, FeatureMissing

HYBRID = """\
23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw
"""
UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1 = "".join(HYBRID.splitlines(keepends=True)[:-1])
PART = "50 23 0:26 /docker/4f /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
SPACED = "51 23 0:26 / /mnt/my\\040tree\\134x rw - cgroup2 none rw\n"
NOT_QUITE = "52 23 0:50 / /mnt/cgroup2 rw - tmpfs cgroup2 rw\n52 garbage - cgroup2\n\n"


def mount(point: str, minor: int, root: str = "/") -> Mount:
    return Mount(Path(point), PurePosixPath(root), os.makedev(0, minor))


@pytest.mark.parametrize(
    ("mountinfo", "expected"),
    [
        (HYBRID, (mount("/sys/fs/cgroup/unified", 38),)),
        (UNIFIED, (mount("/sys/fs/cgroup", 26),)),
        (VERSION_1, ()),
        ("", ()),
        (NOT_QUITE, ()),
        (SPACED, (mount("/mnt/my tree\\x", 26),)),
        (PART + UNIFIED, (mount("/sys/fs/cgroup", 26), mount("/sys/fs/cgroup", 26, "/docker/4f"))),
    ],
)
def test_the_mount_table_is_read(mountinfo: str, expected: tuple[Mount, ...]) -> None:
    assert cgroups.parse_mounts(mountinfo) == expected


@pytest.mark.parametrize(
    ("root", "name", "expected"),
    [
        ("/", "/", "/cg"),
        ("/", "/a/b", "/cg/a/b"),
        ("/docker/4f", "/docker/4f/x", "/cg/x"),
        ("/docker/4f", "/docker/4f", "/cg"),
        ("/docker/4f", "/docker/4", None),
        ("/", "/../other", None),  # outside this cgroup namespace
        ("/", "", None),
    ],
)
def test_names_of_cgroups_become_folders(root: str, name: str, expected: str | None) -> None:
    path = mount("/cg", 1, root).path_of(name)
    assert path == (Path(expected) if expected else None)


@pytest.mark.parametrize(("text", "said"), [(VERSION_1, "not mounted"), (HYBRID, "hides it")])
def test_no_tree_and_a_hidden_one_are_told_apart(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    # A device that nothing on this machine has: as if something else were mounted over the tree.
    table.write_text(text.replace("0:38", "0:1048575"))
    monkeypatch.setattr(cgroups, "_MOUNTINFO", table)
    with pytest.raises(FeatureMissing, match=said):
        cgroups.find_mount()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """An empty cgroup at the top of the tree."""
    path = cgroups.find_mount().point / f"tlt-{os.getpid()}"
    cgroups.make(path)
    yield path
    assert cgroups.remove(path)


@pytest.mark.root
def test_ip_netns_exec_has_no_tree(make_netns: Callable[[], Namespace]) -> None:
    argv = ["ip", "netns", "exec", make_netns().name, sys.executable, "-c"]
    code = "from tlsched import cgroups; cgroups.find_mount()"
    done = subprocess.run([*argv, code], capture_output=True, text=True, timeout=60)
    assert "nsenter --net=" in done.stderr.splitlines()[-1]


@pytest.mark.root
def test_a_cgroup_is_found_by_folder_and_by_name(cgroup: Path) -> None:
    texts = (
        str(cgroup),
        f"{cgroup}/",
        f"/{cgroup.name}",
        cgroup.name,
        f"{cgroup}/../{cgroup.name}",
    )
    assert {cgroups.find(text) for text in texts} == {cgroup}


@pytest.mark.root
@pytest.mark.parametrize("text", ["", "/no/such", "/etc", "/sys/fs", "/../..", "a\0b", "x" * 300])
def test_what_is_no_cgroup_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cgroup"):
        cgroups.find(text)


@pytest.mark.root
def test_the_kernel_and_we_agree_on_a_cgroup(cgroup: Path) -> None:
    (cgroup / "below").mkdir()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        (cgroup / "below" / "cgroup.procs").write_text(str(sleeper.pid))
        assert list(cgroups.walk(cgroup)) == [cgroup, cgroup / "below"]
        assert cgroups.processes(cgroup / "below") == (sleeper.pid,)
        assert cgroups.processes(cgroup) == ()
        assert not cgroups.remove(cgroup)
        assert cgroups.processes(cgroup / "below") == (sleeper.pid,)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert cgroups.is_top(cgroups.find("/"))
    assert not cgroups.is_top(cgroup)
    assert not cgroups.is_top(cgroup / "gone")
    assert cgroups.own().is_dir()
    with pytest.raises(FileExistsError):
        cgroups.make(cgroup)
