"""Predicted memory of a training step as text."""

import dataclasses
from collections.abc import Mapping

from paceline.accounting.memory.step import MemoryParts
from paceline.core.units import format_binary_bytes


def instants_text(instants: Mapping[str, MemoryParts]) -> str:
    """Returns what is held as text, a row per part and a column per instant."""
    names = [field.name for field in dataclasses.fields(MemoryParts)]
    rows = [["", *(instant.replace("_", " ") for instant in instants)]]
    rows += [
        [name.replace("_", " "), *(_format(getattr(held, name)) for held in instants.values())]
        for name in [*names, "total"]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    )


def _format(num_bytes: int) -> str:
    return format_binary_bytes(num_bytes) if num_bytes else "-"
