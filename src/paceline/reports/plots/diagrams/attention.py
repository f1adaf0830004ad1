"""Diagram of the score tiles that FlashAttention visits, and the order of each program."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from paceline.reports.plots.style import COLORS, GRAY, blank_figure

_LENGTH = 30
_BLOCK = 4
_UNMASKED, _MASKED, _LEFT_OUT = COLORS[0], COLORS[1], "#eef1f4"


def plot_tiles() -> Figure:
    """Draws the causal scores of 30 tokens in 4 x 4 tiles, and one program of each kind."""
    figure = blank_figure("FlashAttention-2: the tiles that are computed", (9.0, 5.5))
    by_queries, by_keys = figure.subplots(1, 2)
    _draw_tiles(by_queries, "forward and dQ: a program owns queries and walks over keys")
    _draw_tiles(by_keys, "dK and dV: a program owns keys and walks over queries")
    middle = _BLOCK / 2
    fifth, third = 4 * _BLOCK, 2 * _BLOCK
    _draw_walk(by_queries, (0.5, fifth + middle), (fifth + _BLOCK - 0.5, fifth + middle))
    _draw_walk(by_keys, (third + middle, third + 0.5), (third + middle, _LENGTH - 0.5))
    patches = [
        Patch(facecolor=_UNMASKED, label="every query sees every key: no mask"),
        Patch(facecolor=_MASKED, label="cut by the diagonal or the end: masked"),
        Patch(facecolor=_LEFT_OUT, edgecolor=GRAY, label="not visited"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_tiles(axes: Axes, title: str) -> None:
    for first_query in range(0, _LENGTH, _BLOCK):
        last_query = min(first_query + _BLOCK, _LENGTH) - 1
        for first_key in range(0, _LENGTH, _BLOCK):
            last_key = first_key + _BLOCK - 1
            color = _LEFT_OUT
            if last_key <= first_query:
                color = _UNMASKED
            elif first_key <= last_query:
                color = _MASKED
            width = min(last_key, _LENGTH - 1) - first_key + 1
            height = last_query - first_query + 1
            axes.add_patch(
                Rectangle((first_key, first_query), width, height, facecolor=color, edgecolor="w")
            )
    axes.plot([0, _LENGTH], [0, _LENGTH], color=GRAY, linewidth=1, linestyle=":")
    axes.set_xlim(-0.5, _LENGTH + 0.5)
    axes.set_ylim(_LENGTH + 0.5, -0.5)
    axes.set_aspect("equal")
    axes.set_title(title, fontsize="small")
    axes.set_xlabel("keys (position)")
    axes.set_ylabel("queries (position)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_walk(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    arrow = {"arrowstyle": "-|>", "color": "white", "linewidth": 2.5}
    axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
