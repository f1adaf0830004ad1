"""Merges the traces of several ranks into one."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence

import msgspec

from paceline.traces.events.reader import AnyEvent, TraceError, TraceReader

_FOOTER_BYTES = 2**16
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})')
_NAMES_OF_PROCESS = ("process_name", "process_labels", "process_sort_index")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracePart:
    """The trace recorded by one rank."""

    path: pathlib.Path
    rank: int
    offset_ns: int
    """Nanoseconds to add to the rank's clock."""


def merge_traces(parts: Sequence[TracePart], output: pathlib.Path) -> None:
    """Writes one trace in which each rank is a process, with constant memory."""
    origins = [_base_ns(part.path) + part.offset_ns for part in parts]
    first = min(origins)
    unfinished = output.with_name(output.name + ".unfinished")
    encoder = msgspec.json.Encoder()
    try:
        with unfinished.open("wb") as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
            separator = b"\n"
            for part, origin in zip(parts, origins, strict=True):
                for event in _events_of_rank(part, (origin - first) / 1e3):
                    file.write(separator)
                    file.write(encoder.encode(event))
                    separator = b",\n"
            file.write(b'\n], "baseTimeNanoseconds": %d}\n' % first)
        unfinished.replace(output)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise TraceError(f"the trace could not be written to {output}: {error}") from error


def _events_of_rank(part: TracePart, shift_us: float) -> Iterator[AnyEvent]:
    communicating: set[int | str] = set()
    yield _name("process_name", part.rank, 0, f"rank {part.rank}")
    yield {**_name("process_sort_index", part.rank, 0, ""), "args": {"sort_index": part.rank}}
    for events in TraceReader(part.path, AnyEvent):
        for event in events:
            if event.get("name") in _NAMES_OF_PROCESS and event.get("ph") == "M":
                continue
            event["pid"] = part.rank
            if "ts" in event:
                event["ts"] = round(event["ts"] + shift_us, 3)
            if "id" in event:
                # Ids must be unique across ranks, or arrows from host to device would cross ranks.
                event["id"] = f"{part.rank}.{event['id']}"
            if str(event.get("name")).startswith("gloo:"):
                communicating.add(event["tid"])
            yield event
    for thread in communicating:
        yield _name("thread_name", part.rank, thread, "communication")


def _name(what: str, process: int, thread: int | str, name: str) -> AnyEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def _base_ns(path: pathlib.Path) -> int:
    """Returns the base time of a trace's timestamps."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _FOOTER_BYTES))
        match = _BASE.search(file.read())
    return int(match[1]) if match else 0
