"""The exception tree.

Every error that Paceline raises on purpose is a `PacelineError`: the command line turns
it into one line on stderr and its `exit_code`. Anything else that escapes is a defect of
Paceline and keeps its traceback. A message names the culprit and says what to do.
"""

import difflib
from collections.abc import Iterable


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


class DataError(PacelineError):
    """Training data that cannot be read, prepared or trusted, naming the file or shard."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question that names the known names most like an unknown one; empty if none is."""
    by_lower_case = {each.lower(): each for each in known}
    close = [each for each in by_lower_case if each.startswith(f"{name.lower()}-")]
    close = close or difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    names = " or ".join(repr(by_lower_case[each]) for each in close)
    return f"did you mean {names}? " if names else ""
