"""The timeline picture of `tlsched plan`: when each policy sends which bucket."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tlsched.errors import ConfigError, FeatureMissing
from tlsched.planning.compare import Expected


def require_matplotlib() -> None:
    """Raise FeatureMissing when no picture can be drawn."""
    if find_spec("matplotlib") is None:
        raise FeatureMissing(
            "a picture needs matplotlib", hint="pip install matplotlib, or leave --picture out"
        )


def draw(expected: Sequence[Expected], title: str, path: Path) -> None:
    """Draw a row a policy; the suffix of ``path`` tells the format. Raises ConfigError.

    From the moment that a gradient is ready until its average is there a bucket is a bar, at the
    height of its need; a dot tells when forward asks for it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.2 * len(expected)), layout="constrained")
    axes = figure.subplots(len(expected), 1, sharex=True, squeeze=False)[:, 0]
    for axis, one in zip(axes, expected, strict=True):
        timeline = one.simulated.timeline
        waits_s = [times.sent_s - times.ready_s for times in timeline]
        places = range(len(timeline))
        late = ["tab:red" if times.sent_s > times.needed_s else "tab:blue" for times in timeline]
        axis.barh(places, waits_s, left=[t.ready_s for t in timeline], color=late, height=0.8)
        axis.plot([t.needed_s for t in timeline], places, ".k", markersize=2)
        axis.axvline(one.profile.backward_s, color="grey", linewidth=0.8)
        axis.axvline(one.iteration_s, color="black", linewidth=0.8)
        axis.set_title(f"{one.policy}: {one.iteration_s:.4g} s", loc="left", fontsize=9)
        axis.set_ylabel("bucket")
        axis.invert_yaxis()
    axes[-1].set_xlabel(
        "seconds from the beginning of backward; grey: forward begins; dot: needed; red: waited for"
    )
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be drawn ({error})", hint="give a .png, .svg or .pdf"
        ) from error
