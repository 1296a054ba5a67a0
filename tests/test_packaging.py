"""What a user installs: a wheel with the C sources, the stub headers and the licences."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "LICENSES", "tlsched")


def _run(*argv: str | Path, cwd: Path) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy: a build leaves folders in the tree it builds."""
    work = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copy = REPOSITORY / name, work / "source" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    _run(sys.executable, "-m", *build, "-w", work, work / "source", cwd=work)
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A fresh virtual environment's bin folder; tlsched's dependencies are lent by this one."""
    venv = wheel.parent / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=wheel.parent)
    pip = ["pip", "--python", str(venv / "bin/python")]
    _run(sys.executable, "-m", *pip, "install", "--no-deps", "--no-index", wheel, cwd=wheel.parent)
    # A path named in a .pth file comes last and its own .pth files are not read, so the
    # editable tlsched there stays out of sight.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = (path for path in (REPOSITORY / "tlsched").rglob("*") if path.is_file())
    wanted = {str(p.relative_to(REPOSITORY)) for p in files if "__pycache__" not in p.parts}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
    licences = {name.split("licenses/")[1] for name in names if "dist-info/licenses/" in name}
    assert licences == {"LICENSE", "LICENSES/GPL-2.0-only.txt", "LICENSES/BSD-2-Clause.txt"}
    assert not [name for name in names if name.startswith(("tests/", "bench/"))]


def test_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    assert "attach" in _run(installed / "tlsched", "--help", cwd=tmp_path)
    where = _run(
        installed / "python", "-c", "import tlsched; print(tlsched.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(installed.parent)


@pytest.mark.root
def test_installed_classifier_loads(installed: Path, tmp_path: Path) -> None:
    """The C source and the stub headers are found where the wheel puts them."""
    code = """
from tlsched import bands
from tlsched.ebpf import program
with program.load(bands.all_bands()) as classifier:
    print(program.__file__, classifier.program_id > 0)
"""
    out = _run(installed / "python", "-c", code, cwd=tmp_path)
    assert out.startswith(str(installed.parent))
    assert out.strip().endswith("True")
