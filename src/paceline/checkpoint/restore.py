"""Loads the newest intact checkpoint, the same one on all ranks."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from paceline.checkpoint.catalog import Checkpoint, open_checkpoint
from paceline.checkpoint.dcp import JsonLoadPlanner, named_failures
from paceline.checkpoint.dcp_reader import CheckpointReader
from paceline.checkpoint.errors import CheckpointError, DamagedCheckpointError
from paceline.checkpoint.format import Json, Manifest
from paceline.checkpoint.storage import Place, open_place
from paceline.core.finding import Finding
from paceline.parallel.ranks.collectives import from_first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A loaded checkpoint, and the damaged ones that were skipped."""

    step: int
    identity: Json
    """Metadata of the run."""
    ranks: list[Json]
    """Metadata of each rank that saved."""
    passed_over: list[Finding]
    """Newer, damaged checkpoints."""


class Source:
    """A checkpoint to load from.

    Args:
        checkpoint: A checkpoint with an intact manifest.
        group: CPU process group of the loading ranks; all ranks by default.
        reader: Reads the checkpoint, if its files alone are not sufficient.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        group: dist.ProcessGroup | None = None,
        reader: CheckpointReader | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.reader = CheckpointReader(checkpoint) if reader is None else reader
        self.group = group

    def load(self, state: dict[str, Any]) -> None:
        """Fills the tensors of a state in place, and replaces its other values.

        All ranks must call it. If it raises, the state is partially filled.

        Args:
            state: The saved state or a part of it; distributed in any way.
        """
        with named_failures(f"loading {self.checkpoint.storage.url}"):
            load_state(
                state,
                storage_reader=self.reader,
                planner=JsonLoadPlanner(),
                process_group=self.group,
            )


def load_newest_valid(
    where: str | os.PathLike[str],
    load: Callable[[Source], None],
    group: dist.ProcessGroup | None = None,
) -> Restored | None:
    """Loads the newest checkpoint in which every byte is intact; returns None if there is none.

    A damaged checkpoint is set aside, so that the run can save that step again, and the next older
    one is tried. Raises if all are damaged: the user must decide whether to start over.

    Args:
        where: A directory that all ranks share, or ``s3://bucket/prefix``.
        load: Loads what it needs from a source, the same on all ranks; called again after a
            failure.
        group: CPU process group of the ranks; all ranks by default.
    """
    place = open_place(where)
    passed_over: list[Finding] = []
    for step in from_first(place.steps, group):
        try:
            source = Source(
                from_first(functools.partial(open_checkpoint, place, step), group), group
            )
            load(source)
            source.reader.verify_rest(group)
        except DamagedCheckpointError as error:
            passed_over.append(Finding(name="damaged", message=str(error)))
            from_first(functools.partial(_set_aside, place, step), group)
            continue
        return restored_from(source.checkpoint.manifest, passed_over)
    if passed_over:
        raise CheckpointError(
            f"{place.url}: none of {len(passed_over)} checkpoints is intact; the newest: "
            f"{passed_over[0].message}"
        )
    return None


def restored_from(manifest: Manifest, passed_over: list[Finding]) -> Restored:
    """Returns the metadata of a checkpoint whose state was loaded."""
    return Restored(
        step=manifest.step,
        identity=json.loads(bytes(manifest.identity)),
        ranks=[json.loads(bytes(one)) for one in manifest.ranks],
        passed_over=passed_over,
    )


def load_step(
    where: str | os.PathLike[str],
    step: int,
    load: Callable[[Source], None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Loads one checkpoint, in which every byte must be intact.

    Args:
        where: A directory that all ranks share, or ``s3://bucket/prefix``.
        step: A published step.
        load: Loads what it needs from a source, the same on all ranks.
        group: CPU process group of the ranks; all ranks by default.
    """
    place = open_place(where)
    source = Source(from_first(functools.partial(open_checkpoint, place, step), group), group)
    load(source)
    source.reader.verify_rest(group)


def _set_aside(place: Place, step: int) -> None:
    """Sets a damaged step aside; if nothing may be written there, it stays."""
    try:
        place.set_aside(step, os.urandom(4).hex())
    except CheckpointError:
        return
