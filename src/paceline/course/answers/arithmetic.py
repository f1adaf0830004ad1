"""Answers that need no measurement: sums in low formats, autocast, accounting of a large model."""

from paceline.core.presets import model_preset
from paceline.course.accounting import account
from paceline.course.number_formats import AUTOCAST_FORMATS, repeated_sum
from paceline.reports.document.model import Block
from paceline.reports.evidence.groups import Evidence
from paceline.reports.tables.table import Table

_SUMS = (
    ("float32", "float32", ""),
    ("float16", "float16", ""),
    ("float32", "float16", ""),
    ("float32", "float16", ", cast to float32 first"),
)
_EXACT = 10.0


def calculate_sums(_evidence: Evidence) -> tuple[Block, ...]:
    """Adds 0.01 a thousand times in four ways."""
    sums = [repeated_sum(sum_format=total, term_format=term) for total, term, _ in _SUMS]
    worst = max(sums, key=lambda each: abs(each.result - _EXACT))
    represented = sums[2]
    return (
        Block(
            heading="0.01 added a thousand times, calculated",
            tables=(
                Table(
                    headers=("sum", "term", "result", "error"),
                    rows=tuple(
                        (
                            total,
                            f"{term}{how}",
                            f"{found.result:.4f}",
                            f"{found.result - _EXACT:+.4f}",
                        )
                        for (total, term, how), found in zip(_SUMS, sums, strict=True)
                    ),
                    caption="rounded to the format of the sum after every addition",
                ),
            ),
            findings=(
                f"The sum in {worst.sum_format} is furthest off, {worst.result:.4f}: its numbers "
                f"are {worst.spacing:.4g} apart there, so every addition above 8 moves it by that "
                f"instead of {worst.term:.6f}.",
                f"{represented.result:.4f} is another error: {represented.term_format} has no "
                "0.01, "
                f"the nearest is {represented.term:.9f}, and a thousand of those are "
                f"{1000 * represented.term:.4f} however they are added. Casting the term "
                "afterwards "
                "changes nothing.",
                "So sums belong in float32 even when their terms do not.",
            ),
        ),
    )


def explain_autocast(_evidence: Evidence) -> tuple[Block, ...]:
    """Lists what autocast computes in which format."""
    return (
        Block(
            heading="Linear layer, layer norm, linear layer; float32 weights under autocast",
            tables=(
                Table(
                    headers=("what", "on CUDA", "on a CPU"),
                    rows=AUTOCAST_FORMATS,
                    caption="checked by tests/unit/models/test_mixed_precision.py",
                ),
            ),
            findings=(
                "The loss is float32, not sixteen bits: cross-entropy is on autocast's list of "
                "operations that run in float32.",
                "Layer norm is kept in float32 because it sums squares: in float16 anything above "
                "256 overflows when squared. bfloat16 has float32's range, so nothing overflows, "
                "but eight significant bits are few for the sums of a mean and a variance.",
            ),
        ),
    )


def calculate_accounting(_evidence: Evidence) -> tuple[Block, ...]:
    """Answers the four accounting questions."""
    answers = account(model_preset("xxl"))
    states, sharded, fixed, free = (answer.values for answer in answers)
    return (
        Block(
            heading="xxl, calculated",
            working=answers,
            findings=(
                f"(a) The states, {states['state_bytes'] / 2**30:,.0f} GiB, are worth "
                f"{states['devices_of_80_gib']:.0f} H100 before any activation; those add "
                f"{states['saved_bytes_per_token']:,.0f} bytes for every token, whatever the "
                "number of parameters is divided by.",
                f"(b) Without activations {sharded['devices_of_95_gib']:.0f} devices are enough, "
                f"with 4096 tokens each {sharded['devices_with_4096_tokens']:.0f}, and with "
                f"{sharded['most_tokens_per_device']:,.0f} no number is, because half of the "
                "activations is not divided.",
                f"(c) On 16 by 4 devices computing hides communication from "
                f"{fixed['batch_tokens_add']:,.0f} tokens on if the two axes add up, from "
                f"{fixed['batch_tokens_overlap']:,.0f} if they overlap.",
                f"(d) Choosing the two axes again lowers that to {free['batch_tokens_add']:,.0f} "
                "or "
                f"{free['batch_tokens_overlap']:,.0f} tokens. Pipeline stages and gathers in fewer "
                "bits lower it further; accumulation and longer contexts do not, they only make "
                "the batch larger.",
            ),
        ),
    )
