"""Records one trace of several ranks, on synchronised clocks.

Phases: the recording ranks compare their clocks with rank 0's; each records with torch's profiler
and writes a file; after a barrier, rank 0 merges the files into one trace that Perfetto and Chrome
open, with a process for each rank and a lane for each thread and stream.

Ranks under one kernel share a clock. Clocks of different hosts are compared by exchanging messages,
as NTP does: the peer's clock is assumed to be read halfway between sending and receiving. The
fastest of many exchanges is used; its error is at most half its duration.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Iterator, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch.profiler import profile

from paceline.core.files import atomic_file
from paceline.devices import accelerator
from paceline.traces.reader import AnyEvent, TraceError, TraceReader

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
    encoder = msgspec.json.Encoder()
    try:
        output.parent.stat()  # A misspelt directory is an error, not a new directory.
        with atomic_file(output) as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
            separator = b"\n"
            for part, origin in zip(parts, origins, strict=True):
                for event in _events_of_rank(part, (origin - first) / 1e3):
                    file.write(separator)
                    file.write(encoder.encode(event))
                    separator = b",\n"
            file.write(b'\n], "baseTimeNanoseconds": %d}\n' % first)
    except OSError as error:
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


_EXCHANGES = 16
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def clock_offset_ns(num_ranks: int, device: torch.device) -> int:
    """Returns the nanoseconds to add to this rank's clock to get rank 0's; collective call.

    Ranks from `num_ranks` on do not record and get zero.
    """
    rank = dist.get_rank()
    kernels: list[str] = [_kernel()]
    dist.broadcast_object_list(kernels, src=0, device=device)
    needs_exchange = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    needs_exchange[rank] = 0 < rank < num_ranks and kernels[0] != _kernel()
    dist.all_reduce(needs_exchange)
    offset = 0
    for peer in needs_exchange.nonzero().flatten().tolist():
        if rank == 0:
            _answer(peer, device)
        elif rank == peer:
            offset = _ask(device)
    return offset


def _answer(peer: int, device: torch.device) -> None:
    for _ in range(_EXCHANGES):
        clock = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(clock, src=peer)
        accelerator.synchronize_stream(device)  # On an accelerator, recv does not wait for it.
        clock.fill_(time.time_ns())
        dist.send(clock, dst=peer)


def _ask(device: torch.device) -> int:
    exchanges = []
    for _ in range(_EXCHANGES):
        clock = torch.zeros(1, dtype=torch.int64, device=device)
        sent = time.time_ns()
        dist.send(clock, dst=0)
        dist.recv(clock, src=0)
        theirs = int(clock.item())
        received = time.time_ns()
        exchanges.append((received - sent, theirs - (sent + received) // 2))
    return min(exchanges)[1]


def _kernel() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"unknown, rank {dist.get_rank()}"


MAX_RANKS = 16
"""Maximum number of ranks recorded: more lanes are unreadable, and the first ranks are typical."""


@contextlib.contextmanager
def record_memory(
    path: pathlib.Path, device: torch.device, snapshot: pathlib.Path
) -> Iterator[None]:
    """Records every allocation with its Python stack.

    On CUDA, the allocator's history is also written to `snapshot`, for torch's memory viewer.
    """
    accelerator.start_memory_history(device)
    try:
        with profiling(path, device, memory=True, stacks=True):
            yield
        accelerator.write_memory_history(device, snapshot)
    finally:
        accelerator.stop_memory_history(device)


@contextlib.contextmanager
def profiling(
    path: pathlib.Path,
    device: torch.device,
    *,
    shapes: bool = False,
    memory: bool = False,
    stacks: bool = False,
) -> Iterator[None]:
    """Records host and device with torch's profiler, and writes a Chrome trace on exit.

    `stacks` records Python functions, which makes a step several times slower.
    """
    # The profiler logs its start and stop to stderr by default.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(
        activities=accelerator.profiler_activities(device),
        record_shapes=shapes,
        profile_memory=memory,
        with_stack=stacks,
        acc_events=True,
    ) as profiler:
        yield
    try:
        profiler.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        raise TraceError(f"the trace could not be written to {path}: {error}") from error


@contextlib.contextmanager
def record_ranks(path: pathlib.Path, device: torch.device) -> Iterator[None]:
    """Records all ranks of the default group into one trace; collective call.

    The directory of the merged trace must be visible to all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    recording = min(world_size, MAX_RANKS)
    offset_ns = clock_offset_ns(recording, device)
    part = _part_path(path, rank)
    with profiling(part, device, shapes=True) if rank < recording else contextlib.nullcontext():
        yield
    offsets: list[int] = [0] * world_size
    dist.all_gather_object(offsets, offset_ns)
    if rank == 0:
        parts = [
            TracePart(path=_part_path(path, index), rank=index, offset_ns=offsets[index])
            for index in range(recording)
        ]
        if missing := [str(part.path) for part in parts if not part.path.exists()]:
            raise TraceError(
                f"the first rank cannot see {', '.join(missing)}; write to a directory that all "
                "hosts share"
            )
        merge_traces(parts, path)
        for part_of_rank in parts:
            part_of_rank.path.unlink()
    dist.barrier()


def _part_path(path: pathlib.Path, rank: int) -> pathlib.Path:
    return path.with_name(f".{path.name}.rank{rank}")
