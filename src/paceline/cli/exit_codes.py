"""Converts the exceptions of a verb to one line on stderr and an exit code."""

import os
import sys
from collections.abc import Callable

from paceline.core.errors import DISK_FULL, PacelineError


def guarded(run: Callable[[], int]) -> int:
    """Runs a verb and returns its exit code; prints expected errors as one line."""
    try:
        exit_code = run()
        sys.stdout.flush()
    except PacelineError as error:
        sys.stderr.write(f"paceline: error: {error}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "paceline").partition(".")[0]
        if package == "paceline":
            raise
        sys.stderr.write(f"paceline: error: {_missing(package)}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("paceline: interrupted\n")
        return 130
    except BrokenPipeError:
        # Python flushes stdout again at exit, so redirect it to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None and error.errno not in DISK_FULL:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        remedy = "free disk space" if error.errno in DISK_FULL else "name another path"
        sys.stderr.write(f"paceline: error: {where}{error.strerror}; {remedy}\n")
        return 1
    return exit_code


def _missing(package: str) -> str:
    """Returns the error message for a missing package, with a remedy."""
    if package == "torch":
        return (
            "torch is not installed, and this command needs it; pip install torch (the CPU build "
            "if there is no GPU); plan, scaling, data, report and lab work without torch"
        )
    return f"the package {package} is not installed; pip install {package}"
