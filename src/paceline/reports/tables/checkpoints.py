"""Table of the checkpoints of a run."""

from collections.abc import Sequence

from paceline.checkpoint.catalog import CheckpointSummary
from paceline.core.units import format_binary_bytes
from paceline.reports.tables.table import Table


def checkpoints_table(found: Sequence[CheckpointSummary], place: str) -> Table:
    """Returns a row per checkpoint: size, files, tensors, ranks that saved it, completeness."""
    return Table(
        headers=("step", "size", "files", "tensors", "ranks", "state"),
        rows=tuple(
            (
                f"{summary.step:,}",
                format_binary_bytes(summary.num_bytes),
                f"{summary.num_files:,}",
                f"{summary.num_tensors:,}",
                f"{summary.world_size:,}",
                summary.problem or "complete",
            )
            for summary in found
        ),
        caption=f"{place}: {len(found):,} checkpoints",
    )
