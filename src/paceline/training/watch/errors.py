"""How a watched run ends when it cannot go on."""

from paceline.core.errors import PacelineError
from paceline.core.processes import LOST_PEER


class AgreedError(PacelineError):
    """An error that all ranks raise alike, so that one of them is enough to say it."""

    is_final = False
    """Whether the run would end in the same way if it were started again."""


class DivergedError(AgreedError):
    """Losses or gradients that no rank has updated its parameters with."""

    is_final = True


class CorruptionError(AgreedError):
    """Weights or optimizer state that are no longer what they were computed to be."""

    exit_code = 71


class LostRankError(PacelineError):
    """A rank that the others have waited for in vain; the first of them says so."""

    exit_code = LOST_PEER
