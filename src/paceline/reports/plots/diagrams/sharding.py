"""What each rank holds under the stages of sharding, and what it sends in a step."""

import dataclasses
from typing import TYPE_CHECKING

from paceline.reports.plots.style import COLORS, GRAY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_RANKS = 4
_EMPTY = "#eef1f4"
# Bytes per parameter in float32 with Adam's two moments.
_HELD = {"parameters": 4, "gradients": 4, "optimizer state": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stage:
    title: str
    sharded: tuple[str, ...]
    sent: str


_STAGES = (
    _Stage(
        title="data parallel",
        sharded=(),
        sent="all-reduce of gradients: 2Ψ",
    ),
    _Stage(
        title="sharded optimizer\n(ZeRO-1's memory)",
        sharded=("optimizer state",),
        sent="all-reduce of gradients: 2Ψ\nparameters from owners: Ψ",
    ),
    _Stage(
        title="sharded data parallel\n(ZeRO-2)",
        sharded=("optimizer state", "gradients"),
        sent="gradients to owners: Ψ\nparameters from owners: Ψ",
    ),
    _Stage(
        title="fully sharded\n(ZeRO-3)",
        sharded=("optimizer state", "gradients", "parameters"),
        sent="layers gathered twice: 2Ψ\ngradients to owners: Ψ",
    ),
)


def plot_stages() -> "Figure":
    """Draws four ranks under each stage."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    figure.suptitle("What each of four ranks holds, and sends per step", fontweight="bold")
    for axes, stage in zip(figure.subplots(1, len(_STAGES), sharey=True), _STAGES, strict=True):
        _draw_stage(axes, stage)
    patches = [Patch(color=COLORS[index], label=name) for index, name in enumerate(_HELD)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.axes[0].set_ylabel("bytes per parameter")
    return figure


def _draw_stage(axes: "Axes", stage: _Stage) -> None:
    for rank in range(_NUM_RANKS):
        bottom = 0.0
        for index, (name, num_bytes) in enumerate(_HELD.items()):
            if name in stage.sharded:
                axes.bar(rank, num_bytes, 0.8, bottom, color=_EMPTY)
                share = num_bytes / _NUM_RANKS
                axes.bar(rank, share, 0.8, bottom + rank * share, color=COLORS[index])
            else:
                axes.bar(rank, num_bytes, 0.8, bottom, color=COLORS[index])
            bottom += num_bytes
    held = sum(
        num_bytes / (_NUM_RANKS if name in stage.sharded else 1)
        for name, num_bytes in _HELD.items()
    )
    axes.set_title(stage.title, fontsize="small")
    axes.set_xticks(range(_NUM_RANKS), [f"rank {rank}" for rank in range(_NUM_RANKS)], fontsize=7)
    axes.set_xlabel(f"{held:g} bytes held\n{stage.sent}", fontsize="small")
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
