"""The exception tree.

Every error that Paceline raises on purpose is a `PacelineError`: the command line turns
it into one line on stderr and its `exit_code`. Anything else that escapes is a defect of
Paceline and keeps its traceback. A message names the culprit and says what to do.
"""

import difflib
import errno
from collections.abc import Iterable

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a disk, or a user's share of it, that has no room left."""


_OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "out of memory",
)


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


class TruncatedError(DataError):
    """A file that ends before what was to be read of it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, a kernel or Python says that memory could not be had."""
    says_so = any(message in str(error) for message in _OUT_OF_MEMORY_MESSAGES)
    return says_so or isinstance(error, MemoryError)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question that names the known names most like an unknown one; empty if none is."""
    by_lower_case = {each.lower(): each for each in known}
    close = [each for each in by_lower_case if each.startswith(f"{name.lower()}-")]
    close = close or difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    names = " or ".join(repr(by_lower_case[each]) for each in close)
    return f"did you mean {names}? " if names else ""
