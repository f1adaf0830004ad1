"""Histogram of the document lengths of a dataset."""

from matplotlib.figure import Figure

from paceline.core.units import format_count
from paceline.data.inspect import DocumentLengths
from paceline.reports.plots.style import COLORS, GRAY, add_grid, blank_figure


def plot_document_lengths(lengths: DocumentLengths, what: str, context_length: int) -> Figure:
    """Draws the number of documents by length in tokens, and marks the context length.

    Args:
        lengths: The document counts by length.
        what: The dataset and split, for the subtitle.
        context_length: Tokens per training sequence.
    """
    figure = blank_figure("Documents by length")
    axes = figure.subplots()
    positions = range(len(lengths.counts))
    axes.bar(positions, lengths.counts, width=0.9, color=COLORS[0])
    axes.set_xticks(
        list(positions), [format_count(2**position) for position in positions], rotation=45
    )
    axes.set_xlabel("tokens in the document, from this many to twice as many")
    axes.set_ylabel("documents")
    axes.margins(y=0.12)  # Room for the label below.
    axes.set_title(
        f"{what}: {lengths.num_documents:,} documents, {lengths.num_tokens:,} tokens, "
        f"the longest {lengths.longest:,}",
        fontsize="medium",
        color=GRAY,
    )
    if context_length < 2 ** len(lengths.counts):
        # The left edge of a bar stands for its power of two.
        exponent = context_length.bit_length() - 1
        position = exponent + (context_length / 2**exponent - 1) - 0.5
        axes.axvline(position, color=COLORS[1], linestyle="--")
        axes.annotate(
            f"context of {context_length:,}",
            (position, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -12),
            textcoords="offset points",
            color=COLORS[1],
        )
    add_grid(axes, "y")
    return figure
