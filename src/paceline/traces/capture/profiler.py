"""Records one trace of several ranks, on synchronised clocks.

Phases: the recording ranks compare their clocks with rank 0's; each records with torch's profiler
and writes a file; after a barrier, rank 0 merges the files into one trace that Perfetto and Chrome
open, with a process for each rank and a lane for each thread and stream.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from paceline.traces.capture.clock_alignment import clock_offset_ns
from paceline.traces.capture.merge import TracePart, merge_traces
from paceline.traces.events.reader import TraceError

MAX_RANKS = 16
"""Maximum number of ranks recorded: more lanes are unreadable, and the first ranks are typical."""

_SNAPSHOT_ENTRIES = 1_000_000


@contextlib.contextmanager
def record_memory(
    path: pathlib.Path, device: torch.device, snapshot: pathlib.Path
) -> Iterator[None]:
    """Records every allocation with its Python stack.

    On a GPU, the allocator's history is also written to `snapshot`, for torch's memory viewer.
    """
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
    try:
        with profiling(path, device, memory=True, stacks=True):
            yield
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
    finally:
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)


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
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
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
