"""What records of attention alone answer: its quadratic memory, and what tiles make of it."""

import dataclasses
from collections.abc import Sequence

from paceline.accounting import attention_saved_bytes
from paceline.core.specs import BatchShape
from paceline.core.units import format_binary_bytes, format_seconds
from paceline.course.answers.block import measured_block
from paceline.course.findings.attention import (
    flash_sentences,
    growth_power,
    shortest,
    why_missing,
)
from paceline.course.findings.compiled_attention import (
    compiled_sentences,
    compiled_table,
    pair_compiled,
)
from paceline.course.findings.phrases import verdict
from paceline.records import Record
from paceline.reports.document.model import Block, Picture
from paceline.reports.document.pictures import draw_picture, picture_of
from paceline.reports.evidence.fields import case_number, describe_fields, split_fields
from paceline.reports.evidence.groups import Evidence, comparable_groups, varies
from paceline.reports.evidence.provenance import describe_environments
from paceline.reports.plots.diagrams.attention import plot_tiles
from paceline.reports.tables.attention import implementations_table, kernels_table
from paceline.reports.tables.table import Table, records_table

_EXAMPLE = BatchShape(num_sequences=8, context_length=16384)
_EXAMPLE_HEAD_DIM = 16
_QUADRATIC = 1.5
"""A power above this is nearer to the square than to the first."""


def answer_naive(evidence: Evidence) -> tuple[Block, ...]:
    """Answers how time and memory of attention that stores its scores grow."""
    found = evidence.find("attention", implementation="naive", compile="none", causal=False)
    blocks = []
    groups = comparable_groups(found, ("head_dim", "context"), holds=varies("context"))
    for number, group in enumerate(groups):
        ordered = sorted(
            group,
            key=lambda record: (case_number(record, "head_dim"), case_number(record, "context")),
        )
        blocks.append(
            measured_block(
                group,
                tables=(records_table(ordered),),
                pictures=_two_pictures(ordered, f"attention-naive-{number}"),
                findings=_naive_sentences(ordered),
            )
        )
    return tuple(blocks)


def _two_pictures(records: Sequence[Record], name: str) -> tuple[Picture, ...]:
    return tuple(
        draw_picture(plot, records, f"{name}-{what}", f"{what.capitalize()} of attention by length")
        for plot, what in (("attention-time", "time"), ("attention-memory", "memory"))
    )


def _naive_sentences(records: Sequence[Record]) -> list[str]:
    widths: dict[float, list[Record]] = {}
    for record in records:
        if record.metrics:
            widths.setdefault(case_number(record, "head_dim"), []).append(record)
    width, line = max(widths.items(), key=lambda item: (len(item[1]), item[0]))
    sentences = []
    if len(line) > 1:
        sentences += _growth_sentences(line[-2], line[-1])
    last = line[-1]
    batch = BatchShape(
        num_sequences=int(case_number(last, "batch")),
        context_length=int(case_number(last, "context")),
    )
    if last.case["dtype"] == "float32":
        expected = attention_saved_bytes("naive", batch, int(width), 4, causal=False)
        measured = last.metrics["saved_for_backward_bytes"].value
        sentences.append(f"{_saved(last)} {verdict(measured, expected, 0.01)}.")
    stopped = [record for record in records if not record.metrics]
    if stopped:
        first = shortest(stopped)
        sentences.append(
            f"The shortest that has no numbers is length {first.case['context']} at head width "
            f"{first.case['head_dim']}: {why_missing(first)}."
        )
    else:
        sentences.append("Every length that was tried fitted.")
    sentences.append(
        "Computing the scores again in backward, tile by tile, removes what grows with the square."
    )
    return sentences


def _growth_sentences(first: Record, last: Record) -> list[str]:
    powers = [
        growth_power(first, last, name) for name in ("saved_for_backward_bytes", "forward_time_s")
    ]
    if powers[0] is None or powers[1] is None:
        return []
    shape = "its square" if powers[0] > _QUADRATIC else "the length itself"
    return [
        f"From length {first.case['context']} to {last.case['context']} (head width "
        f"{last.case['head_dim']}) what is saved for backward grows with power {powers[0]:.2f} of "
        f"the length, nearest to {shape}, to {_saved(last)}, and forward with power "
        f"{powers[1]:.2f}, to {format_seconds(last.metrics['forward_time_s'].value)}."
    ]


def _saved(record: Record) -> str:
    return format_binary_bytes(record.metrics["saved_for_backward_bytes"].value)


def calculate_naive(_evidence: Evidence) -> tuple[Block, ...]:
    """Calculates the memory of one of the configurations that run out."""
    scores = 4 * _EXAMPLE.num_sequences * _EXAMPLE.context_length**2
    saved = attention_saved_bytes("naive", _EXAMPLE, _EXAMPLE_HEAD_DIM, 4, causal=False)
    tiled = attention_saved_bytes("tiled", _EXAMPLE, _EXAMPLE_HEAD_DIM, 4, causal=False)
    return (
        Block(
            heading="Batch 8, length 16384, head width 16, float32, calculated",
            tables=(
                Table(
                    headers=("what", "formula", "memory"),
                    rows=(
                        ("one matrix of scores", "4 B N²", format_binary_bytes(scores)),
                        (
                            "saved for backward",
                            "3 · 4 B N D + 4 B N²",
                            format_binary_bytes(saved),
                        ),
                        (
                            "scores, probabilities and a gradient, at the peak",
                            "at least 3 · 4 B N²",
                            format_binary_bytes(3 * scores),
                        ),
                        (
                            "saved by tiles that are computed again",
                            "4 · 4 B N D + 4 B N",
                            format_binary_bytes(tiled),
                        ),
                    ),
                    caption="B sequences of N tokens, heads of width D",
                ),
            ),
            findings=(
                f"The probabilities are {scores / saved:.1%} of what is saved, "
                f"{format_binary_bytes(saved)}; without them {format_binary_bytes(tiled)} are "
                "left, "
                f"{saved / tiled:,.0f} times less.",
            ),
        ),
    )


def answer_compiled_attention(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what compiling attention gains."""
    found = evidence.find("attention", implementation="naive")
    blocks = []
    over = ("compile", "head_dim", "context")
    for number, group in enumerate(comparable_groups(found, over, holds=varies("compile"))):
        measured = [record for record in group if record.metrics]
        pairs = pair_compiled(measured)
        if not pairs:
            continue
        longest = pairs[-1]
        drawn = [
            record
            for pair in pairs
            for record in (pair.plain, pair.compiled)
            if pair.width == longest.width
        ]
        blocks.append(
            measured_block(
                measured,
                tables=(compiled_table(pairs),),
                pictures=(
                    draw_picture(
                        "attention-time",
                        drawn,
                        f"attention-compiled-{number}",
                        "Time of attention by length, plain and compiled",
                    ),
                ),
                findings=compiled_sentences(pairs),
            )
        )
    return tuple(blocks)


def explain_tiles(_evidence: Evidence) -> tuple[Block, ...]:
    """Shows which tiles FlashAttention-2 computes, and what is saved."""
    batch = BatchShape(num_sequences=1, context_length=16384)
    sizes = {
        name: attention_saved_bytes(name, batch, 64, 2, causal=True) for name in ("naive", "tiled")
    }
    return (
        Block(
            heading="What is computed, and what is kept",
            pictures=(
                picture_of(plot_tiles(), "attention-tiles", "Tiles of the scores by program"),
            ),
            findings=(
                "Forward keeps a running maximum and sum per query, and saves the output and one "
                "logarithm of a sum per query; backward computes each tile of the probabilities "
                "again from it.",
                f"At length 16384 and width 64 in bfloat16 {format_binary_bytes(sizes['naive'])} "
                f"saved for backward become {format_binary_bytes(sizes['tiled'])}.",
                "paceline.kernels.TiledAttentionFunction is the one in PyTorch, "
                "TritonAttentionFunction the one in Triton; tests hold output, gradients and "
                "logsumexp of both against the formula.",
            ),
        ),
    )


def answer_kernels(evidence: Evidence) -> tuple[Block, ...]:
    """Answers what the Triton kernels take of a GPU, compiled ahead of time."""
    found = evidence.find("kernel")
    measured = [record for record in found if record.metrics]
    if not measured:
        return ()
    table = kernels_table(found)
    shared, _varying = split_fields(found)
    captions = [text for text in (describe_fields(shared), table.caption) if text]
    return (
        Block(
            heading="Compiled for GPUs that need not be there",
            tables=(dataclasses.replace(table, caption=", ".join(captions)),),
            findings=tuple(_kernel_sentences(measured)),
            environments=describe_environments(found),
        ),
    )


def _kernel_sentences(measured: Sequence[Record]) -> list[str]:
    spilled = [record for record in measured if record.metrics["spill_bytes"].value > 0]
    fullest = max(measured, key=lambda record: record.metrics["registers"].value)
    sentences = [
        f"{len(spilled)} of {len(measured)} kernels spill registers; the fullest, "
        f"{fullest.case['kernel']} for {fullest.case['architecture']}, uses "
        f"{fullest.metrics['registers'].value:.0f}."
    ]
    multiplying = [record for record in measured if record.metrics["matrix_instructions"].value]
    if not multiplying:
        return [*sentences, "None of them has an instruction of the matrix units."]
    worst = min(multiplying, key=lambda record: record.metrics["worst_ceiling"].value)
    return [
        *sentences,
        "The lowest ceiling of those that multiply, "
        f"{worst.metrics['worst_ceiling'].value:.0%} of the peak, is that of "
        f"{worst.case['kernel']} for {worst.case['architecture']}; smaller tiles or fewer stages "
        "trade it against occupancy.",
    ]


def answer_flash(evidence: Evidence) -> tuple[Block, ...]:
    """Answers how the implementations compare by length, width and format."""
    found = evidence.find("attention", compile="none", causal=True)
    blocks = []
    over = ("implementation", "head_dim", "context", "dtype")
    groups = comparable_groups(found, over, holds=varies("implementation"))
    for number, group in enumerate(groups):
        blocks.append(
            measured_block(
                group,
                tables=(implementations_table(group),),
                pictures=_two_pictures(group, f"attention-flash-{number}"),
                findings=flash_sentences(group),
            )
        )
    return tuple(blocks)
