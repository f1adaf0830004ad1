"""Diagram of each rank's memory and communication per step, by stage of sharding."""

import dataclasses

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paceline.reports.plots.style import GRAY, MEMORY_STYLES, blank_figure

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
    _Stage(title="data parallel", sharded=(), sent="all-reduce of gradients: 2Ψ"),
    _Stage(
        title="sharded optimizer\n(ZeRO-1's memory)",
        sharded=("optimizer state",),
        sent="all-reduce of gradients: 2Ψ\nall-gather of parameters: Ψ",
    ),
    _Stage(
        title="sharded data parallel\n(ZeRO-2)",
        sharded=("optimizer state", "gradients"),
        sent="reduce-scatter of gradients: Ψ\nall-gather of parameters: Ψ",
    ),
    _Stage(
        title="fully sharded\n(ZeRO-3)",
        sharded=("optimizer state", "gradients", "parameters"),
        sent="all-gather of layers, twice: 2Ψ\nreduce-scatter of gradients: Ψ",
    ),
)


def plot_stages() -> Figure:
    """Draws the memory of four ranks under each stage."""
    figure = blank_figure("What each of four ranks holds, and sends per step", (9.0, 4.6))
    for axes, stage in zip(figure.subplots(1, len(_STAGES), sharey=True), _STAGES, strict=True):
        _draw_stage(axes, stage)
    patches = [Patch(color=_color(name), label=name) for name in _HELD]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.axes[0].set_ylabel("bytes per parameter")
    return figure


def _draw_stage(axes: Axes, stage: _Stage) -> None:
    for rank in range(_NUM_RANKS):
        bottom = 0.0
        for name, num_bytes in _HELD.items():
            if name in stage.sharded:
                axes.bar(rank, num_bytes, 0.8, bottom, color=_EMPTY)
                shard = num_bytes / _NUM_RANKS
                axes.bar(rank, shard, 0.8, bottom + rank * shard, color=_color(name))
            else:
                axes.bar(rank, num_bytes, 0.8, bottom, color=_color(name))
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


def _color(name: str) -> str:
    return MEMORY_STYLES[name.replace(" ", "_")][0]
