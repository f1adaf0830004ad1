"""Diagnostics of a hanging rank: its stacks, and its last collective."""

import faulthandler
import json
import math
import pathlib
from typing import Any

import msgspec
import torch

from paceline.core.units import format_decimal


class LastCollective(msgspec.Struct, frozen=True, kw_only=True):
    """The newest entry of torch's flight recorder."""

    number: int
    """Number of collectives that this rank has started in its group, including this one."""
    text: str
    """Operation and size."""


def dump_stacks(directory: pathlib.Path, rank: int) -> pathlib.Path:
    """Writes the Python stack of every thread, and torch's flight recorder if available.

    Works even while the main thread is blocked in C.

    Args:
        directory: Directory of the ranks' files.
        rank: This rank.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank-{rank}.txt"
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    if (recorded := _flight_recorder()) is not None:
        (directory / f"rank-{rank}.flight.json").write_text(json.dumps(recorded), encoding="utf-8")
    return path


def last_collective() -> LastCollective | None:
    """Returns the last collective that this rank started; None if torch recorded none."""
    entries = (_flight_recorder() or {}).get("entries", [])
    for entry in reversed(entries):
        if entry.get("is_p2p"):
            continue
        name = str(entry.get("profiling_name", "collective")).partition(":")[2] or "collective"
        num_elements = sum(math.prod(sizes) for sizes in entry.get("input_sizes", []))
        kind = (entry.get("input_dtypes") or ["?"])[0]
        return LastCollective(
            number=int(entry.get("collective_seq_id", 0)),
            text=f"{name} of {format_decimal(num_elements, 'elements')} ({kind})",
        )
    return None


def _flight_recorder() -> dict[str, Any] | None:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        recorded: dict[str, Any] = json.loads(dump())
    except (RuntimeError, ValueError):
        return None
    return recorded
