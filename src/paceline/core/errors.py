"""The exception tree.

Every error that Paceline raises on purpose is a `PacelineError`: the command line turns
it into one line on stderr and its `exit_code`. Anything else that escapes is a defect of
Paceline and keeps its traceback. A message names the culprit and says what to do.
"""


class PacelineError(Exception):
    """Base of all errors that are raised on purpose."""

    exit_code = 1


class UsageError(PacelineError):
    """What was asked for makes no sense; asking differently helps."""

    exit_code = 2


class ShapeError(UsageError):
    """A model, batch or layout that cannot exist or cannot be built."""


class HardwareError(UsageError):
    """A device, link or figure that the hardware table does not hold."""


class RecordError(PacelineError):
    """A record store that cannot be read or written, naming file, line and field."""
