"""Parses counts and times from the command line: 4M tokens, 1e24 FLOPs, 30d."""

from paceline.core.errors import UsageError
from paceline.core.units import parse_quantity

_BINARY = {"k": 2**10, "m": 2**20}
_DECIMAL = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


def parse_batch_tokens(text: str, context_length: int) -> int:
    """Returns sequences per batch; 4M is 4 x 2^20 tokens, as batches are powers of two."""
    tokens = _plain(text)
    if tokens is None:
        tokens = parse_quantity(text, _BINARY, "batch", "4M (4 x 2^20 tokens), 512K or 4194304")
    sequences = tokens / context_length
    if sequences < 1 or sequences != int(sequences):
        nearest = max(1, round(sequences))
        raise UsageError(
            f"--batch-tokens {text} is {sequences:.4g} sequences of {context_length:,} tokens; "
            f"give a multiple of the context length, such as {nearest * context_length}"
        )
    return int(sequences)


def parse_count(text: str, what: str, example: str) -> float:
    """Parses a number such as 1e12, 15T or 300B, with decimal suffixes."""
    number = _plain(text)
    if number is None:
        number = parse_quantity(text, _DECIMAL, what, example)
    if not number > 0:
        raise UsageError(f"--{what} {text} must be positive")
    return number


def parse_days(text: str) -> float:
    """Parses a duration such as 30d, 12h or 2w into days."""
    days = parse_quantity(text, _DAYS, "deadline", "30d, 12h or 2w")
    if not days > 0:
        raise UsageError(f"--deadline {text} must be positive")
    return days


def _plain(text: str) -> float | None:
    try:
        number = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None
    if number != number or number in (float("inf"), float("-inf")):
        raise UsageError(f"{text!r} is no number; write it like 1e12")
    return number
