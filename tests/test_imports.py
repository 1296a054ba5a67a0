"""Imports run one way, and the expensive packages have one user each."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tlsched

PACKAGE = Path(tlsched.__file__).parent
ROOT = "__init__"  # the package itself: `import tlsched`
BASE = {"config", "bands", "errors", "trust"}

# Who may import whom inside tlsched. `cli` may import anything.
MAY_IMPORT = {
    "errors": set[str](),
    "bands": {"errors"},
    "trust": {"errors"},
    "config": {"bands", "errors", "trust"},
    "configfile": BASE,
    "unitfiles": {"errors"},
    "cgroups": {"errors"},
    "capabilities": set[str](),
    "descriptors": {"errors"},
    "addressspace": {"errors"},
    "tc": BASE,
    "ebpf": {"addressspace", "capabilities", "cgroups", "descriptors", *BASE},
    "marking": {"linkstatus", "cgroups", "ebpf", *BASE},
    "runs": {"cgroups", "ebpf", *BASE},
    "sweep": set[str](),  # runs by itself, without tlsched
    "linkstatus": {"linkclassifier", "tc", "ebpf", *BASE},
    "linktrust": {"tc", "ebpf", *BASE},
    "metrics": {"linkstatus"},
    "doctor": {
        "control",
        "linkstatus",
        "tc",
        "ebpf",
        "capabilities",
        "cgroups",
        "netlink",
        *BASE,
    },
    "netlink": set[str](),
    "sockdiag": {"netlink", "errors"},
    "livetraffic": {"linkstatus", "sockdiag", "bands", "errors"},
    "linkclassifier": {"tc", "ebpf", "trust", *BASE},
    "control": {"linkclassifier", "linkstatus", "linktrust", "tc", "ebpf", *BASE},
    "lab": {"capabilities", *BASE},
    "planning": {"bands", "errors"},
    "shim": {"planning", "bands", "errors"},
    ROOT: {"shim", "errors"},
    "shapes": {"planning", "errors"},
    "demo": {ROOT, "lab", "shapes", "shim", "planning", *BASE},
    "__main__": {"cli"},
}

PYROUTE2 = ("kernel", "device", "probe", "wire", "messages", "filters", "decode", "plugins")

# Who may import which package from outside the standard library.
USERS = {
    "pyroute2": tuple(f"tc.{name}" for name in PYROUTE2),
    "bcc": ("ebpf.compiler",),
    "numpy": ("planning", "shim", "demo"),
    "torch": ("shim", "shapes", "demo"),
    "sklearn": ("demo",),
    "bayes_opt": ("planning.tuning",),
    "matplotlib": ("demo", "cli.picture"),
    "typer": ("cli",),
    "rich": ("cli",),
    "prometheus_client": ("metrics",),
}

# As if tlsched had been installed without its extras on a host without bcc.
BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "bcc", "sklearn", "matplotlib", "bayes_opt"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@dataclass(frozen=True)
class Source:
    """A module of tlsched: its dotted name below the package, and its syntax tree."""

    name: str
    tree: ast.Module

    @property
    def layer(self) -> str:
        return self.name.split(".")[0]

    def imports(self) -> Iterator[str]:
        """Absolute dotted names, also of imports inside functions and for type checking."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: relative import"
                assert node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _sources() -> list[Source]:
    return [
        Source(
            ".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(path.read_text())
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


SOURCES = _sources()
LAYERS = {source.layer for source in SOURCES}


def _layer_of(imported: str) -> str:
    """The layer that "tlsched.a.b" belongs to; a name that is none is the package's own."""
    part = imported.split(".")[1] if "." in imported else ROOT
    return part if part in LAYERS else ROOT


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_one_way(source: Source) -> None:
    if source.layer == "cli":
        return
    assert source.layer in MAY_IMPORT, f"{source.layer}: say in MAY_IMPORT where it belongs"
    inside = {name for name in source.imports() if name.split(".")[0] == "tlsched"}
    layers = {_layer_of(name) for name in inside} - {source.layer}
    assert layers <= MAY_IMPORT[source.layer]


def test_the_rule_has_no_circle() -> None:
    list(TopologicalSorter(MAY_IMPORT).static_order())


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_each_foreign_package_has_its_users(source: Source) -> None:
    tops = {name.split(".")[0] for name in source.imports()}
    for package in tops - {"tlsched"} - sys.stdlib_module_names:
        assert package in USERS, f"{package} is no dependency of tlsched"
        users = USERS[package]
        assert source.name in users or source.layer in users, f"not a user of {package}"


def _ends_or_prints(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise) and node.exc is not None:
        return "SystemExit" in ast.unparse(node.exc)
    ending = {"print", "exit", "quit", "sys.exit", "os._exit"}
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ending


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_only_the_command_line_prints_or_exits(source: Source) -> None:
    if source.layer != "cli":
        lines = [node.lineno for node in ast.walk(source.tree) if _ends_or_prints(node)]  # type: ignore[attr-defined]  # Raise and Call have a line
        assert not lines


def _run(code: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", BARE + code]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_import_without_torch_and_bcc() -> None:
    done = _run(
        "import tlsched, tlsched.control, tlsched.lab, tlsched.planning, tlsched.cli\n"
        "import tlsched.shim.ps.child, tlsched.shim.ps.server"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    ["--help", "attach --help", "lab --help", "plan --help", "demo --help", "server --help"],
)
def test_help_without_torch_and_bcc(command: str) -> None:
    argv = ["tlsched", *command.split()]
    done = _run(f"sys.argv = {argv}\nfrom tlsched.cli import main\nmain()")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_schedule_without_torch_names_what_is_missing() -> None:
    done = _run("import tlsched\ntry: tlsched.schedule\nexcept ImportError as e: print(e.name)")
    assert done.stdout == "torch\n", done.stderr
