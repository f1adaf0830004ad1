"""The exception tree.

Every error that Paceline raises on purpose is a `PacelineError`: the command line prints it
as one line on stderr and exits with its `exit_code`. Any other uncaught exception is a bug in
Paceline and keeps its traceback. Messages name the cause and the fix.
"""

import difflib
import errno
from collections.abc import Iterable

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""errno values for a full disk and for an exceeded disk quota."""


_OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "out of memory",
)


class PacelineError(Exception):
    """Base class of all errors that Paceline raises on purpose."""

    exit_code = 1


class UsageError(PacelineError):
    """An invalid request; changing the arguments or the configuration fixes it."""

    exit_code = 2


class ShapeError(UsageError):
    """A model, batch or layout that is invalid or cannot be built."""


class HardwareError(UsageError):
    """A device, link or figure that is not in the hardware table."""


class RecordError(PacelineError):
    """A record store cannot be read or written; the message names file, line and field."""


class DataError(PacelineError):
    """Training data is unreadable or invalid; the message names the file or shard."""


class TruncatedError(DataError):
    """A file ends before the data that was to be read."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error from torch, the kernel or Python means out of memory."""
    says_so = any(message in str(error) for message in _OUT_OF_MEMORY_MESSAGES)
    return says_so or isinstance(error, MemoryError)


def unknown_name(what: str, name: str, known: Iterable[str]) -> UsageError:
    """Returns the error for a name that is not among the known ones, with the closest of them."""
    names = list(known)
    return UsageError(f"{what} {name!r}; {did_you_mean(name, names)}known: {', '.join(names)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a "did you mean" hint with the closest known names; empty if none is close."""
    by_lower_case = {each.lower(): each for each in known}
    close = [each for each in by_lower_case if each.startswith(f"{name.lower()}-")]
    close = close or difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    names = " or ".join(repr(by_lower_case[each]) for each in close)
    return f"did you mean {names}? " if names else ""
