"""Formats the predicted memory of a training step as text."""

import dataclasses
from collections.abc import Mapping

from paceline.accounting.memory.step import MemoryParts
from paceline.core.units import format_binary_bytes


def instants_text(instants: Mapping[str, MemoryParts]) -> str:
    """Returns memory in use as text, with a row per part and a column per instant."""
    names = [field.name for field in dataclasses.fields(MemoryParts)]
    rows = [["", *(instant.replace("_", " ") for instant in instants)]]
    rows += [
        [name.replace("_", " "), *(_format(getattr(held, name)) for held in instants.values())]
        for name in [*names, "total"]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _format(num_bytes: int) -> str:
    return format_binary_bytes(num_bytes) if num_bytes else "-"
