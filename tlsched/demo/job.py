"""What a rank is asked to train, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

REPLAY_MODEL = "vgg16"
REPLAY_SCALE = 0.1
REPLAY_COMPUTE_S = 0.6
# Two iterations learn, seven are measured, then the lanes are chosen anew; two more to settle. The
# same for all policies.
WARMUP = 11


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is asked to do: ``part`` is real (digits), text, replay, or calibrate.

    Which trains nothing (see :mod:`tlsched.demo.calibration`).
    ``policy`` is one of tlsched's, ``ddp`` or, for the replay, ``fsdp2``. ``compute_s`` (seconds an
    iteration), ``scale`` (of layer sizes) and ``model`` (a shape's name) are the replay's. The
    first ``warmup`` iterations are not timed.

    ``bucket_cap_mb`` is DDP's bucket size in MiB, ``window`` ByteScheduler's partition and credit
    in bytes, ``lanes`` which lanes to use; None is everybody's default. ``servers`` are addresses
    of parameter servers; without, a ring averages.
    """

    part: str
    policy: str
    iterations: int
    trace: bool = False
    compute_s: float = REPLAY_COMPUTE_S
    scale: float = REPLAY_SCALE
    model: str = REPLAY_MODEL
    warmup: int = WARMUP
    bucket_cap_mb: int | None = None
    window: tuple[int, int] | None = None
    lanes: tuple[int, ...] | None = None
    servers: tuple[str, ...] = ()


@dataclass(slots=True)
class Result:
    """Seconds of each iteration after the warm-up, the last loss and, for real, the accuracy.

    ``losses`` are this rank's, one an iteration. ``began_s`` is when the first timed iteration
    began, by CLOCK_MONOTONIC. ``startup_s`` is what opening the context took, ``cpu_s`` the
    processor time of a timed iteration, all threads together. ``peak_bytes`` is the most memory
    that the process has had resident so far. ``window`` is what ByteScheduler used at last,
    ``messages`` the all-reduces of an iteration. ``fabric`` is what was calibrated.

    ``timeline`` holds a dict a bucket (``bytes``, ``ready_s``, ``sent_s``, ``needed_s``, measured
    from the step() before) of one iteration, when it was asked for.
    """

    iteration_s: list[float]
    loss: float
    accuracy: float | None = None
    peak_bytes: int = 0
    timeline: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    began_s: float = 0.0
    startup_s: float = 0.0
    cpu_s: float = 0.0
    window: tuple[int, int] | None = None
    messages: float | None = None
    fabric: dict[str, float] = field(default_factory=dict)
