"""Loads the newest state that the hosts of a run still hold in memory."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.core.finding import Finding
from paceline.training.checkpoint.agreement import from_all
from paceline.training.checkpoint.catalog import read_manifest
from paceline.training.checkpoint.errors import DamagedCheckpointError
from paceline.training.checkpoint.format.manifest import Manifest, decode_manifest, encode_manifest
from paceline.training.checkpoint.memory.checkpointer import MemoryCheckpointer
from paceline.training.checkpoint.memory.reader import HeldFiles, HeldReader, Holders
from paceline.training.checkpoint.places.memory import MemoryPlace
from paceline.training.checkpoint.restore import Restored, Source, restored_from

_Save = tuple[int, str]
"""Step and id of a published attempt: two hosts may hold different ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Held:
    """Files of a save that a host holds."""

    own: frozenset[str]
    """Files that its ranks have written and that have their full size."""
    replicas: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromMemory:
    """Result of loading from memory."""

    restored: Restored | None
    """None if no state in memory is usable."""
    findings: list[Finding]
    """Why newer states, or all states, were not usable."""
    received_bytes: int = 0
    """Bytes that this rank received from other hosts."""


def load_newest_held(
    memory: MemoryCheckpointer, load: Callable[[Source], None], is_wanted: Callable[[Manifest], str]
) -> FromMemory:
    """Loads the newest step whose files are all in the memory of some host.

    All ranks must call it, and load the same step. Damaged files are loaded from their replicas. If
    those are damaged too, the step is unusable, and the state is partially filled.

    Args:
        memory: Memory checkpointer of the run.
        load: Loads what it needs from a source, the same on all ranks; called again after a
            failure.
        is_wanted: Returns why a step must not be loaded; empty if it may be.
    """
    group = memory.group
    own = _holdings(memory.memory)
    held: list[dict[_Save, _Held]] = from_all({save: one for save, (one, _) in own.items()}, group)
    findings: list[Finding] = []
    for save in sorted({save for of_rank in held for save in of_rank}, reverse=True):
        holder = next(rank for rank, of_rank in enumerate(held) if save in of_rank)
        manifest = _manifest_from(holder, own[save][1] if save in own else None, group)
        if reason := is_wanted(manifest):
            findings.append(Finding(name="unwanted", message=f"step {manifest.step}: {reason}"))
            continue
        parts = [of_rank.get(save) for of_rank in held]
        missing = [file for file in manifest.files if not _ranks_with(parts, file.name)]
        if missing:
            findings.append(
                Finding(
                    name="incomplete",
                    message=f"step {manifest.step}: {len(missing)} of {len(manifest.files)} files "
                    f"are not in the memory of any host, such as {missing[0].name} of rank "
                    f"{missing[0].rank}",
                )
            )
            continue
        for prefer_replica in (False, True):
            reader = _reader(memory, manifest, parts, prefer_replica)
            source = Source(reader.checkpoint, group, reader)
            try:
                load(source)
                reader.verify_rest(group)
            except DamagedCheckpointError as error:
                findings.append(Finding(name="damaged", message=str(error)))
                continue
            return FromMemory(
                restored=restored_from(manifest, []),
                findings=findings,
                received_bytes=reader.received_bytes,
            )
    return FromMemory(restored=None, findings=findings)


def _holdings(place: MemoryPlace) -> dict[_Save, tuple[_Held, Manifest]]:
    """Returns the saves that this host holds, without those that lack an intact manifest."""
    found: dict[_Save, tuple[_Held, Manifest]] = {}
    for step in place.steps():
        try:
            manifest = read_manifest(place.storage(step), step)
        except DamagedCheckpointError:
            continue
        own, replicas = (
            frozenset(
                file.name
                for file in manifest.files
                if _size(place.held_file(step, file.name, is_replica=is_replica)) == file.num_bytes
            )
            for is_replica in (False, True)
        )
        found[step, manifest.save_id] = _Held(own=own, replicas=replicas), manifest
    return found


def _size(path: pathlib.Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _manifest_from(holder: int, own: Manifest | None, group: dist.ProcessGroup | None) -> Manifest:
    """Returns the manifest of one rank on all ranks."""
    if group is None:
        assert own is not None
        return own
    sent: list[Any] = [None if own is None else encode_manifest(own)]
    dist.broadcast_object_list(sent, group=group, group_src=holder)
    return decode_manifest(sent[0], f"the memory of rank {holder}")


def _ranks_with(parts: list[_Held | None], file: str, *, replicas_only: bool = False) -> list[int]:
    return [
        rank
        for rank, part in enumerate(parts)
        if part is not None and (file in part.replicas or (not replicas_only and file in part.own))
    ]


def _reader(
    memory: MemoryCheckpointer, manifest: Manifest, parts: list[_Held | None], prefer_replica: bool
) -> HeldReader:
    by_file: dict[str, list[int]] = {}
    for file in manifest.files:
        replicas = _ranks_with(parts, file.name, replicas_only=True) if prefer_replica else []
        by_file[file.name] = replicas or _ranks_with(parts, file.name)
    files = HeldFiles(memory.memory, manifest.step, prefer_replica=prefer_replica)
    holders = Holders(rank=memory.hosts.rank, by_file=by_file)
    return HeldReader(files, manifest, holders, memory.group)
