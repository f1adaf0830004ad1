"""In-memory checkpoints of a run: saved often and loaded first; failed saves do not end the run.

A save works like one to disk, until every rank has written its files and the first rank has the
manifest. Then, on the checkpoint thread of every rank:

1. All ranks receive the manifest, and allocate space for the replicas that they keep.
2. Each rank sends its files to the rank that keeps their replica.
3. Once all replicas have arrived, the first rank of every host publishes.
4. Once all hosts have published, each removes the previous save. Two saves exist only in between.

A run resumes from the newest state whose files are all in the memory of some host.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.catalog import read_manifest
from paceline.checkpoint.checkpointer import Checkpointer, new_group
from paceline.checkpoint.errors import CheckpointError, DamagedCheckpointError
from paceline.checkpoint.format import Json, Manifest, decode_manifest, encode_manifest
from paceline.checkpoint.memory_storage import (
    MemoryFiles,
    MemoryReader,
    MemoryStorage,
    Messages,
    ReplicaMap,
    run_token,
)
from paceline.checkpoint.restore import Restored, Source, restored_from
from paceline.core.finding import Finding
from paceline.core.units import format_binary_bytes
from paceline.parallel.ranks.collectives import from_all, from_first, require_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run, as seen by one rank."""

    rank: int
    names: tuple[str, ...]
    """Identifier of each rank's host memory."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads its host: the first of the ranks that share its memory."""
        return self.names.index(self.names[self.rank]) == self.rank

    def on(self, name: str) -> list[int]:
        """Returns the ranks that share a host memory."""
        return [rank for rank, each in enumerate(self.names) if each == name]

    def keeper(self, rank: int) -> int | None:
        """Returns the keeper of a rank's replica: its counterpart on the next host.

        With one host, it is the next rank, which protects against a damaged file but not against a
        lost host. A single rank has no keeper.
        """
        if len(self.names) == 1:
            return None
        hosts = list(dict.fromkeys(self.names))
        if len(hosts) == 1:
            return (rank + 1) % len(self.names)
        own = hosts.index(self.names[rank])
        others = self.on(hosts[(own + 1) % len(hosts)])
        return others[self.on(hosts[own]).index(rank) % len(others)]


def send_replicas(
    location: MemoryStorage, manifest: Manifest, hosts: Hosts, group: dist.ProcessGroup | None
) -> None:
    """Sends this rank's files to its keeper, and receives those that it keeps.

    All ranks must call it. If a host has no space for replicas, all ranks raise before anything is
    sent.
    """
    if group is None:
        return
    kept = [file for file in manifest.files if hosts.keeper(file.rank) == hosts.rank]
    rooms = {}

    def reserve() -> None:
        for file in kept:
            rooms[file.name] = location.reserve(
                manifest.step, manifest.save_id, file.name, file.num_bytes
            )

    require_all(reserve, group)
    messages = Messages(group)
    for file in manifest.files:
        keeper = hosts.keeper(file.rank)
        if file.rank == hosts.rank and keeper is not None:
            path = location.own_file(manifest.step, manifest.save_id, file.name)
            messages.send(_mapped(path, file.num_bytes, is_written=False), keeper)
        if keeper == hosts.rank:
            messages.receive(_mapped(rooms[file.name], file.num_bytes, is_written=True), file.rank)
    messages.wait()


def _mapped(path: object, num_bytes: int, *, is_written: bool) -> torch.Tensor:
    """Returns the bytes of a file, mapped into memory without a copy."""
    return torch.from_file(str(path), shared=is_written, size=num_bytes, dtype=torch.uint8)


_TOKEN = "memory-token"


class MemoryCheckpointer(Checkpointer):
    """Saves the state of a run to host memory; every rank creates one and makes the same calls.

    `root` is a tmpfs directory on each host. All ranks share the run's directory `checkpoints`;
    removing it also invalidates the checkpoints in memory.
    """

    def __init__(self, root: str, checkpoints: str) -> None:
        token_file = pathlib.Path(checkpoints).absolute() / _TOKEN
        locations: list[MemoryStorage] = []
        group = new_group()
        try:
            token = from_first(lambda: run_token(token_file), group)
            require_all(
                lambda: locations.append(MemoryStorage(root, str(token_file), token)), group
            )
        except CheckpointError:
            if group is not None:
                dist.destroy_process_group(group)
            raise
        super().__init__(locations[0], group=group)
        self.memory = locations[0]
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.hosts = Hosts(rank=rank, names=tuple(from_all(self.memory.host, group)))
        if self.hosts.is_leader:
            self.memory.sweep()

    def complete(self, step: int, save_id: str) -> None:
        """Sends replicas and publishes on all hosts."""
        content = from_first(lambda: self.memory.manifest, self.group)
        manifest = decode_manifest(content, self.memory.url)
        send_replicas(self.memory, manifest, self.hosts, self.group)
        require_all(lambda: None, self.group)

        def publish() -> None:
            if self.hosts.is_leader:
                self.memory.publish_here(step, save_id, content)

        require_all(publish, self.group)
        if self.hosts.is_leader:
            self.memory.remove_others(step)

    def retain(self) -> None:
        """Does nothing: `complete` has removed the previous save."""

    def forget_others(self, step: int | None) -> None:
        """Removes all steps but `step`, or all if it is None, on every host.

        All ranks must call it, while no save is in progress.
        """
        if self.hosts.is_leader:
            self.memory.remove_others(step)
        require_all(lambda: None, self.group)

    def finish(self) -> None:
        """Frees the memory; all ranks must call it when the run no longer needs it."""
        if self._saving is not None and self._saving.thread is not None:
            self._saving.thread.join()
        require_all(lambda: None, self.group)
        if self.hosts.is_leader:
            self.memory.remove_all()
        self.close()

    def close(self) -> None:
        """Destroys the group; checkpoints in memory stay there."""
        super().close()
        self.memory.close()


_Save = tuple[int, str]
"""Step and id of a published save: two hosts may hold different ones."""


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


def load_newest_in_memory(
    memory: MemoryCheckpointer,
    load: Callable[[Source], None],
    reason_against: Callable[[Manifest], str],
) -> FromMemory:
    """Loads the newest step whose files are all in the memory of some host.

    All ranks must call it, and load the same step. Damaged files are loaded from their replicas. If
    those are damaged too, the step is unusable, and the state is partially filled. `load` loads
    what it needs from a source, the same on all ranks, and is called again after a failure.
    `reason_against` returns why a step must not be loaded; empty if it may be.
    """
    group = memory.group
    own = _holdings(memory.memory)
    held: list[dict[_Save, _Held]] = from_all({save: one for save, (one, _) in own.items()}, group)
    findings: list[Finding] = []
    for save in sorted({save for of_rank in held for save in of_rank}, reverse=True):
        holder = next(rank for rank, of_rank in enumerate(held) if save in of_rank)
        manifest = _manifest_from(holder, own[save][1] if save in own else None, group)
        if reason := reason_against(manifest):
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


def _holdings(location: MemoryStorage) -> dict[_Save, tuple[_Held, Manifest]]:
    """Returns the saves that this host holds, without those that lack an intact manifest."""
    found: dict[_Save, tuple[_Held, Manifest]] = {}
    for step in location.steps():
        try:
            manifest = read_manifest(location.storage(step), step)
        except DamagedCheckpointError:
            continue
        own, replicas = (
            frozenset(
                file.name
                for file in manifest.files
                if _size(location.file_path(step, file.name, is_replica=is_replica))
                == file.num_bytes
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
) -> MemoryReader:
    by_file: dict[str, list[int]] = {}
    for file in manifest.files:
        replicas = _ranks_with(parts, file.name, replicas_only=True) if prefer_replica else []
        by_file[file.name] = replicas or _ranks_with(parts, file.name)
    files = MemoryFiles(memory.memory, manifest.step, prefer_replica=prefer_replica)
    replica_map = ReplicaMap(rank=memory.hosts.rank, by_file=by_file)
    return MemoryReader(files, manifest, replica_map, memory.group)


_ON_DISK = "on_disk"
"""Key in a rank's metadata: the newest step on disk when the rank saved to memory."""


class MemoryTier:
    """Keeps the newest state of a run in host memory; arguments as of `MemoryCheckpointer`.

    Every rank creates one and makes the same calls.
    """

    def __init__(self, root: str, checkpoints: str) -> None:
        self.notices: list[str] = []
        """Messages for the user; the same on all ranks."""
        self._has_failed = False
        self._checkpointer: MemoryCheckpointer | None = None
        try:
            self._checkpointer = MemoryCheckpointer(root, checkpoints)
        except CheckpointError as error:
            self.notices.append(f"checkpoints in memory are off: {error}")

    def save(
        self, step: int, state: dict[str, Any], identity: Json, of_rank: Json, on_disk: int
    ) -> None:
        """Saves a state in memory; failures are reported once, and the next save is still tried.

        Arguments are those of `Checkpointer.save`, and the newest step on disk.
        """
        if self._checkpointer is None:
            return
        try:
            self._checkpointer.wait()
            self._has_failed = False
        except CheckpointError as error:  # From the previous save.
            if not self._has_failed:
                self.notices.append(f"checkpoint not saved in memory, training continues: {error}")
            self._has_failed = True
        self._checkpointer.save(step, state, identity, {**of_rank, _ON_DISK: on_disk})

    def load(self, load: Callable[[Source], None], on_disk: int) -> Restored | None:
        """Loads the newest state in memory, unless a newer one is on disk.

        `on_disk` is negative if there is none on disk.
        """
        if self._checkpointer is None:
            return None

        def reason_against(manifest: Manifest) -> str:
            if manifest.step < on_disk:
                return f"step {on_disk} on disk is newer"
            saved_beside = json.loads(bytes(manifest.ranks[0]))[_ON_DISK]
            if saved_beside > on_disk:
                return f"step {saved_beside}, which was on disk when it was saved, was removed"
            return ""

        found = load_newest_in_memory(self._checkpointer, load, reason_against)
        step = None if found.restored is None else found.restored.step
        self._checkpointer.forget_others(step)
        self.notices += [f"memory: {finding.message}" for finding in found.findings]
        if found.restored is not None:
            received = sum(from_all(found.received_bytes, self._checkpointer.group))
            others = f", {format_binary_bytes(received)} from other hosts" if received else ""
            self.notices.append(f"step {step} was restored from memory{others}")
        elif on_disk < 0 and any(finding.name == "damaged" for finding in found.findings):
            raise CheckpointError(
                "the checkpoint in memory is corrupted and there is none on disk: "
                f"{found.findings[0].message}; it was removed: run the same command again to "
                "start from the beginning"
            )
        return found.restored

    def forget(self) -> None:
        """Discards all states in memory, for a run that rolls back to an earlier state."""
        if self._checkpointer is not None:
            with contextlib.suppress(CheckpointError):
                self._checkpointer.wait()
            self._checkpointer.forget_others(None)

    def finish(self) -> None:
        """Frees the memory."""
        if self._checkpointer is not None:
            with contextlib.suppress(CheckpointError):
                self._checkpointer.finish()
