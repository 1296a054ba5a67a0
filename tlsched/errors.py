"""The error tree. Every error says what is wrong in one line, and what to do next.

``TlschedError`` and below are for people to read: the command line prints them as one line
and exits with ``exit_code``. Anything else that escapes is a defect of ours.
"""

from __future__ import annotations


class TlschedError(Exception):
    """Base of all errors that tlsched raises on purpose.

    ``message`` says what is wrong, ``hint`` what to do next; ``exit_code`` is what the command
    line ends with.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}"


class ConfigError(TlschedError):
    """A flag, a file or an argument is wrong. Nothing was changed."""

    exit_code = 2


class HostError(TlschedError):
    """The host cannot do what was asked (privilege, kernel, interface). Nothing was changed."""

    exit_code = 2


class PermissionMissing(HostError):
    """A capability is missing; the message names it."""


class FeatureMissing(HostError):
    """The kernel, the device or bcc lacks something; the message says what."""


class InterfaceMissing(HostError):
    """There is no such interface, or not any more."""


class ForeignQdisc(HostError):
    """Somebody else's qdisc or filter stands on the link where ours would go."""


class ForeignProgram(HostError):
    """Somebody else's BPF program stands on a cgroup and lets no other beside it."""


class ProgramMissing(HostError):
    """A BPF program or map is not loaded any more."""


class ApplyError(TlschedError):
    """A change failed half-way. It was undone, unless the message says otherwise."""


class LabError(TlschedError):
    """The emulated cluster could not be built or used."""


class TrainingError(TlschedError):
    """Base of what the training shim raises."""


class ModelRefused(TrainingError):
    """This model or optimizer cannot be trained this way. Nothing was changed."""


class RanksDisagree(TrainingError):
    """Ranks hold different models, plans or settings; the message names the first difference."""


class CommunicationError(TrainingError):
    """A collective failed or timed out; the message names what was waited for, and for whom."""
