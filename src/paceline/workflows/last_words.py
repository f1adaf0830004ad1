"""Extracts the error message of a failed command from its log."""

import collections
import pathlib

_ERROR = "paceline: error: "
_LONGEST_REASON = 300
_LINES_LOOKED_AT = 40


def last_words(log: pathlib.Path, exit_code: int) -> str:
    """Returns the error that a command ended with, or else the last line of its log."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        last = collections.deque((line.strip() for line in lines if line.strip()), _LINES_LOOKED_AT)
    # Under the lab, lines are prefixed with the rank.
    errors = [line.partition(_ERROR)[2] for line in last if _ERROR in line]
    words = (errors or list(last) or ["it printed nothing"])[-1]
    return f"exit code {exit_code}: {words[:_LONGEST_REASON]}"
