"""Errors that end a monitored run."""

from paceline.core.errors import PacelineError
from paceline.core.processes import LOST_PEER


class AgreedError(PacelineError):
    """An error that all ranks raise identically, so that one rank can report it."""

    is_final = False
    """Whether a restarted run would end in the same way."""


class DivergedError(AgreedError):
    """Raised for a bad loss or gradients, which no rank has applied."""

    is_final = True


class CorruptionError(AgreedError):
    """Raised when weights or optimizer state are silently corrupted."""

    exit_code = 71


class LostRankError(PacelineError):
    """Raised by the first responding rank when another rank does not respond or is behind."""

    exit_code = LOST_PEER
