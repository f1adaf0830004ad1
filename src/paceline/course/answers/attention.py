"""Answers from attention benchmarks: quadratic memory, and how tiling avoids it."""

import dataclasses
from collections.abc import Iterator, Sequence

from paceline.accounting import attention_saved_bytes
from paceline.core.finding import Finding
from paceline.core.specs import BatchShape
from paceline.core.units import format_binary_bytes
from paceline.course.answers.block import drawn_blocks
from paceline.course.findings.attention import compiled_findings, flash_findings, naive_findings
from paceline.course.findings.template import make_finding
from paceline.records import Record
from paceline.reports.document.model import Block
from paceline.reports.document.pictures import picture_of
from paceline.reports.evidence.fields import case_number, describe_fields, split_fields
from paceline.reports.evidence.groups import Evidence, comparable_groups, varies
from paceline.reports.evidence.provenance import describe_environments
from paceline.reports.plots.diagrams.attention import plot_tiles
from paceline.reports.tables.attention import implementations_table, kernels_table
from paceline.reports.tables.table import Table

_SIZES = ("head_dim", "context")
_TIME = {"attention-time": "Time of attention by length"}
_TIME_AND_MEMORY = {**_TIME, "attention-memory": "Memory of attention by length"}


def answer_naive(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the growth in time and memory of attention that stores its scores."""
    found = evidence.find("attention", implementation="naive", compile="none", causal=False)
    found = sorted(found, key=lambda each: [case_number(each, name) for name in _SIZES])
    groups = comparable_groups(found, _SIZES, holds=varies("context"))
    return drawn_blocks(groups, naive_findings, name="naive", plots=_TIME_AND_MEMORY)


def calculate_naive(_evidence: Evidence) -> tuple[Block, ...]:
    """Calculates the memory of a configuration that runs out of memory."""
    batch = BatchShape(num_sequences=8, context_length=16384)
    scores = 4 * batch.num_sequences * batch.context_length**2
    saved, tiled = (
        attention_saved_bytes(name, batch, 16, 4, causal=False) for name in ("naive", "tiled")
    )
    rows = (
        ("one matrix of scores", "4 B N²", scores),
        ("saved for backward", "3 · 4 B N D + 4 B N²", saved),
        ("scores, probabilities and a gradient, at the peak", "at least 3 · 4 B N²", 3 * scores),
        ("saved if tiles are recomputed in backward", "4 · 4 B N D + 4 B N", tiled),
    )
    table = Table(
        headers=("part", "formula", "memory"),
        rows=tuple((*texts, format_binary_bytes(size)) for *texts, size in rows),
        caption="B sequences of N tokens, heads of dimension D",
    )
    finding = make_finding(
        "attention_saved_bytes",
        "Plain attention saves {saved_bytes} for backward, of which {probabilities_bytes} are the "
        "probabilities. If backward recomputes the probabilities tile by tile, only "
        "{tiled_saved_bytes} are saved, {saved_ratio} times less.",
        probabilities_bytes=scores,
        saved_bytes=saved,
        tiled_saved_bytes=tiled,
        saved_ratio=saved / tiled,
    )
    heading = "Batch 8, length 16384, head dim 16, float32, calculated"
    return (Block(heading=heading, tables=(table,), findings=(finding,)),)


def answer_compiled_attention(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the speedup of compiled attention."""
    found = evidence.find("attention", implementation="naive")
    groups = comparable_groups(found, ("compile", *_SIZES), holds=varies("compile"))
    return drawn_blocks(groups, compiled_findings, name="compiled", plots=_TIME)


def explain_tiles(_evidence: Evidence) -> tuple[Block, ...]:
    """Returns a diagram of the tiles that FlashAttention-2 computes, and the memory it saves."""
    batch = BatchShape(num_sequences=1, context_length=16384)
    naive, tiled = (
        attention_saved_bytes(name, batch, 64, 2, causal=True) for name in ("naive", "tiled")
    )
    picture = picture_of(plot_tiles(), "attention-tiles", "Tiles of the scores by program")
    findings = (
        make_finding(
            "tiles_are_recomputed",
            "Forward keeps a running maximum and sum per query, and saves the output and the "
            "logsumexp of each query. From the logsumexp, backward recomputes the probabilities "
            "tile by tile. At length 16384, head dim 64 and bfloat16, this saves "
            "{tiled_saved_bytes} for backward instead of {naive_saved_bytes}.",
            naive_saved_bytes=naive,
            tiled_saved_bytes=tiled,
        ),
        make_finding(
            "implementations",
            "paceline.kernels.TiledAttentionFunction implements FlashAttention-2 in PyTorch, "
            "TritonAttentionFunction in Triton; tests compare output, gradients and logsumexp of "
            "both with the attention formula.",
        ),
    )
    heading = "What FlashAttention-2 computes and saves"
    return (Block(heading=heading, pictures=(picture,), findings=findings),)


def answer_kernels(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the GPU resources that the Triton kernels use, compiled ahead of time."""
    found = evidence.find("kernel")
    measured = [record for record in found if record.metrics]
    if not measured:
        return ()
    table = kernels_table(found)
    shared, _varying = split_fields(found)
    captions = [text for text in (describe_fields(shared), table.caption) if text]
    return (
        Block(
            heading="Compiled ahead of time, without a GPU",
            tables=(dataclasses.replace(table, caption=", ".join(captions)),),
            findings=tuple(_kernel_findings(measured)),
            environments=describe_environments(found),
        ),
    )


def _kernel_findings(measured: Sequence[Record]) -> Iterator[Finding]:
    fullest = max(measured, key=lambda record: record.metrics["registers"].value)
    yield make_finding(
        "register_spills",
        "{num_spilling} of {num_kernels} kernels spill registers; {kernel} for {architecture} uses "
        "the most registers, {num_registers}.",
        num_spilling=sum(record.metrics["spill_bytes"].value > 0 for record in measured),
        num_kernels=len(measured),
        kernel=str(fullest.case["kernel"]),
        architecture=str(fullest.case["architecture"]),
        num_registers=fullest.metrics["registers"].value,
    )
    multiplying = [record for record in measured if record.metrics["matrix_instructions"].value]
    if not multiplying:
        yield make_finding("no_matrix_units", "No kernel contains a matrix instruction.")
        return
    worst = min(multiplying, key=lambda record: record.metrics["worst_ceiling"].value)
    yield make_finding(
        "lowest_ceiling",
        "Among kernels with matrix instructions, {kernel} for {architecture} has the lowest "
        "roofline ceiling: {peak_share} of the peak FLOP/s if nothing is found in the cache. "
        "Smaller tiles or fewer stages trade this ceiling against occupancy.",
        peak_share=worst.metrics["worst_ceiling"].value,
        kernel=str(worst.case["kernel"]),
        architecture=str(worst.case["architecture"]),
    )


def answer_flash(evidence: Evidence) -> tuple[Block, ...]:
    """Returns a comparison of attention implementations by length, head dim and dtype."""
    found = evidence.find("attention", compile="none", causal=True)
    over = ("implementation", "dtype", *_SIZES)
    groups = comparable_groups(found, over, holds=varies("implementation"))
    return drawn_blocks(
        groups, flash_findings, name="flash", plots=_TIME_AND_MEMORY, table=implementations_table
    )
