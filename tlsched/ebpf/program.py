"""The classifier as a loaded program, its marks filled in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlsched.bands import Band
from tlsched.ebpf import abi, compiler, maps, trustmaps
from tlsched.ebpf.trustmaps import HeldTrust
from tlsched.errors import ConfigError
from tlsched.trust import ANY_LOCAL

_SOURCE = Path(__file__).parent / "classify.bpf.c"


class Classifier(compiler.LoadedProgram):
    """A loaded classifier; a filter on a link keeps it after it is closed here."""


def load(
    bands: Sequence[Band], trust: HeldTrust | None = None, *, ethernet: bool = True
) -> Classifier:
    """Compile and load the classifier with the marks of ``bands`` (lanes first, default last).

    ``trust`` says whose marks count, every local socket's without it; ``ethernet`` whether the
    link's frames begin with an Ethernet header. Raises ConfigError for bands of another shape,
    PermissionMissing without CAP_BPF and CAP_NET_ADMIN, FeatureMissing when bcc or the kernel
    cannot do it.
    """
    names = tuple(band.name for band in bands)
    if names != maps.BAND_NAMES:
        raise ConfigError(
            f"the classifier needs the bands {', '.join(maps.BAND_NAMES)}, got {names}",
            hint="use tlsched.bands.all_bands()",
        )
    with compiler.compiled(_SOURCE, "classifier") as module:
        maps.write_marks(module.map_fd(abi.MARKS_MAP), bands)
        trustmaps.fill(module.map_fd, trust or trustmaps.resolve(ANY_LOCAL), ethernet=ethernet)
        return Classifier(module.load(abi.PROGRAM_NAME, compiler.ProgramType.SCHED_CLS))
