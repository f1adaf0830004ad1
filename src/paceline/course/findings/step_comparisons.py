"""What steps of the same model say of each other: precisions, and compilation."""

from collections.abc import Iterator, Sequence

from paceline.core.finding import Finding
from paceline.core.specs import precision_preset
from paceline.course.findings.devices import peak_flops
from paceline.course.findings.pairs import compare_passes, pairs_with_base
from paceline.course.findings.step import seconds
from paceline.course.findings.template import make_finding
from paceline.records import Record
from paceline.reports.evidence.comparison import compare
from paceline.reports.evidence.models import model_key, model_name


def precision_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields what bf16 and fp16 gain over fp32, by model.

    Args:
        records: Steps with times that differ in model and precision alone.
    """
    for record, base in pairs_with_base(records, "precision", "float32", model_key):
        precision = str(record.case["precision"])
        half = peak_flops(record, precision_preset(precision).compute)
        full = peak_flops(record, "float32")
        yield make_finding(
            f"{precision}_to_float32",
            "Forward and backward of {model} take {ratio} as long in {precision} as in float32, "
            "where the ratio of the device's peaks is {peak_ratio}; the optimizer, which stays in "
            "float32, is {optimizer_share} of the step instead of {float32_optimizer_share}.",
            model=model_name(record),
            precision=precision,
            ratio=compare_passes(record, base),
            peak_ratio=None if half is None or full is None else half / full,
            optimizer_share=seconds(record, "optimizer") / seconds(record, "step"),
            float32_optimizer_share=seconds(base, "optimizer") / seconds(base, "step"),
        )


def compile_findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Yields what compiling each model gains over the same model as it is.

    Args:
        records: Steps with times that differ in model and compilation alone.
    """
    for record, base in pairs_with_base(records, "compile", "none", model_key):
        yield make_finding(
            "compiled_to_plain_step",
            "Compiled ({mode}), a step of {model} takes {step_time_s} instead of "
            "{plain_step_time_s}, {ratio} as long; forward takes {forward_ratio} times as long.",
            mode=str(record.case["compile"]),
            model=model_name(record),
            step_time_s=seconds(record, "step"),
            plain_step_time_s=seconds(base, "step"),
            ratio=compare(record.metrics["step_time_s"], base.metrics["step_time_s"]),
            forward_ratio=seconds(record, "forward") / seconds(base, "forward"),
        )
