"""Compile BPF C and load it: the only user of bcc.

bcc gets our own stub headers (``uapi/``) instead of the kernel's, since the programs need
nothing but UAPI structures; so no headers package is needed on any kernel. Compiling takes
about half a second and 125 MB, all of it given back when the process ends.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from tlsched import addressspace, descriptors
from tlsched.capabilities import CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN, held
from tlsched.ebpf import libbpf
from tlsched.errors import FeatureMissing, HostError, PermissionMissing

_HERE = Path(__file__).parent
_STUB_HEADERS = _HERE / "uapi"
_DEBIAN_PACKAGES = Path("/usr/lib/python3/dist-packages")
_INSTALL_BCC = "apt install python3-bpfcc"

# Compiling and loading opens some 13 at once, measured with bcc 0.26.
_OPEN_FILES = 16
# bcc's libraries and what clang takes: 260 MiB beside a bare tlsched, measured with bcc 0.26.
_ADDRESS_SPACE_BYTES = 300 << 20

# A load changes the environment and standard error of the whole process for half a second.
_one_load_at_a_time = threading.Lock()


class ProgramType(enum.IntEnum):
    """``enum bpf_prog_type`` (linux/bpf.h), as far as we load such programs."""

    SCHED_CLS = 3
    SOCK_OPS = 13


class LoadedProgram:
    """A loaded program; a context manager. The kernel frees it with its last user.

    ``fd`` is the program's descriptor until :meth:`close`; ``tag`` is the kernel's digest of its
    instructions in hex, equal for equal programs.
    """

    def __init__(self, fd: int) -> None:
        """Take over ``fd``."""
        info, _ = libbpf.program_info(fd)
        self.fd = fd
        self.program_id: int = info.id
        self.tag = bytes(info.tag).hex()
        self.name: str = info.name.decode()

    def close(self) -> None:
        """Close the descriptor (what the program hangs on keeps it). May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        """The program itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the descriptor."""
        self.close()


class Module:
    """A compiled C file: its maps are made, its functions can be loaded."""

    def __init__(self, bcc_module: Any, what: str, diagnostics: _Diagnostics) -> None:
        self._bcc_module = bcc_module
        self._what = what
        self._diagnostics = diagnostics

    def map_fd(self, name: str) -> int:
        """The descriptor of a map; it closes with the module (a loaded program keeps the map)."""
        return int(self._bcc_module[name.encode()].map_fd)

    def load(self, function: str, kind: ProgramType) -> int:
        """A loaded function's descriptor, which outlives the module; errors as of :func:`compiled`.

        The function's name becomes the program's.
        """
        try:
            loaded = self._bcc_module.load_func(function.encode(), int(kind))
        except Exception as error:  # bcc raises nothing more specific
            raise self._diagnostics.explain("load", self._what, error) from error
        return fcntl.fcntl(loaded.fd, fcntl.F_DUPFD_CLOEXEC, 0)


@contextlib.contextmanager
def compiled(source: Path, what: str) -> Iterator[Module]:
    """The C file ``source`` compiled; ``what`` it is, for errors ("classifier").

    Raises PermissionMissing without CAP_BPF and CAP_NET_ADMIN, FeatureMissing when bcc or the
    kernel cannot do it.
    """
    _require_capabilities(what)
    descriptors.require(_OPEN_FILES)
    addressspace.require(_ADDRESS_SPACE_BYTES, f"compiling the {what}")
    _require_folder()
    bcc = _import_bcc()
    # bcc appends to the list that it is given, and to its own default: pass a fresh one.
    cflags = [f"-I{_HERE}", "-Wall", "-Wno-unused-function"]
    with _one_load_at_a_time, _Diagnostics() as diagnostics, _stub_headers():
        try:
            module = bcc.BPF(text=source.read_bytes(), cflags=cflags)
        except Exception as error:  # bcc raises nothing more specific
            raise diagnostics.explain("compile", what, error) from error
        try:
            yield Module(module, what, diagnostics)
        finally:
            module.cleanup()


class _Diagnostics:
    """Standard error kept aside meanwhile: bcc prints clang's and the verifier's words there."""

    def __enter__(self) -> Self:
        # In memory: /tmp may be read-only, or full.
        self._file = open(os.memfd_create("tlsched-diagnostics"), "w+b")
        if sys.stderr is not None:
            sys.stderr.flush()
        self._stderr = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._file.close()

    def explain(self, step: str, what: str, error: Exception) -> HostError:
        """The error to raise for bcc's: a missing permission, or the first useful line."""
        self._file.seek(0)
        text = self._file.read().decode(errors="replace")
        if os.strerror(errno.EPERM) in text or "super-user" in str(error):
            return _permission_missing(what)
        lacking = not held() & {CAP_PERFMON, CAP_SYS_ADMIN}
        if step == "load" and lacking and os.strerror(errno.EACCES) in text:
            # Linux 6.1's verifier reads a stack more strictly for who lacks it.
            return PermissionMissing(
                f"this kernel asks for CAP_PERFMON too to load the BPF {what}",
                hint="run it as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON",
            )
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        useful = [line for line in lines if "error" in line] or lines or [str(error)]
        return FeatureMissing(
            f"bcc could not {step} the {what}: {useful[0]}",
            hint="this kernel or this bcc is not one that tlsched knows: please report the line",
        )


@contextlib.contextmanager
def _stub_headers() -> Iterator[None]:
    """BCC_KERNEL_SOURCE points to our headers meanwhile; bcc reads it from the C environment."""
    before = os.environ.get("BCC_KERNEL_SOURCE")
    os.environ["BCC_KERNEL_SOURCE"] = str(_STUB_HEADERS)
    try:
        yield
    finally:
        if before is None:
            del os.environ["BCC_KERNEL_SOURCE"]
        else:
            os.environ["BCC_KERNEL_SOURCE"] = before


def _require_capabilities(what: str) -> None:
    """Raise PermissionMissing unless this process may load a BPF program (capabilities(7))."""
    have = held()
    if CAP_NET_ADMIN not in have or not have & {CAP_BPF, CAP_SYS_ADMIN}:
        raise _permission_missing(what)


def _require_folder() -> None:
    """Raise HostError where this process's folder is gone: clang asks for it and gives up."""
    try:
        os.getcwd()
    except OSError as error:
        raise HostError(
            "the current folder is gone, and the BPF compiler needs one", hint="cd to another"
        ) from error


def _permission_missing(what: str) -> PermissionMissing:
    return PermissionMissing(
        f"no permission to load the BPF {what}: CAP_BPF and CAP_NET_ADMIN are needed",
        hint="run it as root, in a container with both capabilities and bpf(2) allowed",
    )


def find_bcc() -> Path:
    """The folder of the BPF Compiler Collection, also of one that a venv does not see (Debian's).

    Raises FeatureMissing when there is none, and says so when another package bears its name.
    """
    found = _found_on_path()
    for folder in (found, _DEBIAN_PACKAGES / "bcc"):
        if folder is not None and _is_compiler(folder):
            return folder
    if found is None:
        raise FeatureMissing("bcc, the BPF compiler, is missing", hint=_INSTALL_BCC)
    raise FeatureMissing(
        f"the Python package {_describe_installed_bcc()} is not the BPF compiler of that name",
        hint=f"{_INSTALL_BCC}; pip uninstall bcc",
    )


def other_bcc() -> str | None:
    """What `import bcc` gives in place of the BPF compiler; None when that or nothing."""
    found = _found_on_path()
    return None if found is None or _is_compiler(found) else _describe_installed_bcc()


def _is_compiler(folder: Path) -> bool:
    return (folder / "libbcc.py").is_file()


def _import_bcc() -> ModuleType:
    """The BPF Compiler Collection; errors as of :func:`find_bcc`."""
    return _import_from(find_bcc())


def _found_on_path() -> Path | None:
    """The folder (or file) of whatever ``import bcc`` would import."""
    try:
        spec = importlib.util.find_spec("bcc")
    except ValueError:  # a module without a spec was put into sys.modules by hand
        return None
    if spec is None:
        return None
    locations = list(spec.submodule_search_locations or [])
    return Path(locations[0] if locations else spec.origin or "bcc")


def _describe_installed_bcc() -> str:
    try:
        package = importlib.metadata.metadata("bcc")
    except importlib.metadata.PackageNotFoundError:
        return "'bcc'"
    return f"'bcc' {package['Version']} ({package['Summary'] or 'crystallography'})"


def _import_from(folder: Path) -> ModuleType:
    """Import bcc by path, under a name of our own: another `bcc` may have been imported already."""
    name = "_tlsched_bcc"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (OSError, ImportError) as error:  # libbcc.so.0 missing, or of another version
        del sys.modules[name]
        raise FeatureMissing(f"bcc cannot be loaded: {error}", hint=_INSTALL_BCC) from error
    return module
