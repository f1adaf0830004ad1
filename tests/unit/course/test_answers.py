"""Tests how a sentence is filled: units by name, given formats, ratios, and unknown numbers."""

import pytest

from paceline.course.answers import fill, numbers_of, row
from paceline.reports.comparison import Ratio
from tests.unit.course.report_cases import make_record

TIMES = Ratio(value=0.7831, low=0.7554, high=0.8207, num_samples=20)


@pytest.mark.parametrize(
    ("template", "value", "text", "figures"),
    [
        ("{step_s}", 0.0015, "1.5 ms", {"step_s": 0.0015}),
        ("{peak_bytes}", 3 * 2**29, "1.50 GiB", {"peak_bytes": 3 * 2**29}),
        ("{link_bytes_per_s}", 2.5e8, "250 MB/s", {"link_bytes_per_s": 2.5e8}),
        ("{flops_per_s}", 1.65e11, "165 GFLOP/s", {"flops_per_s": 1.65e11}),
        ("{exposed_share}", 0.286, "29%", {"exposed_share": 0.286}),
        ("{count}", 17_547_264, "17,547,264", {"count": 17_547_264}),
        ("{count}", 2.0609, "2.06", {"count": 2.0609}),
        ("{count}", 3.0e11, "3e+11", {"count": 3.0e11}),
        ("{result:.4f}", 9.953125, "9.9531", {"result": 9.953125}),
        ("{model}", "small", "small", {}),
        ("{causal}", True, "True", {}),
        ("{std_s}", None, "unknown", {}),
        (
            "{ratio}",
            TIMES,
            "0.783 times (interval 0.755 to 0.821, samples: 20)",
            {"ratio": 0.7831, "ratio_low": 0.7554, "ratio_high": 0.8207},
        ),
    ],
)
def test_a_value_is_written_by_the_unit_in_its_name(
    template: str, value: object, text: str, figures: dict[str, float]
) -> None:
    name = template.strip("{}").partition(":")[0]
    finding = fill("a_name", f"It is {template}.", {name: value, "other_s": 1.0})  # type: ignore[dict-item]
    assert finding.message == f"It is {text}."
    assert finding.figures == figures
    assert finding.name == "a_name"


def test_a_sentence_may_name_the_case_and_the_metrics_of_several_records() -> None:
    case = {"model": "small", "strategy": "ddp", "bucket_size_mb": 25}
    record = make_record("ddp", {"step_time_s": [1.0, 3.0, 2.0]}, **case)
    rival = make_record("ddp", {"step_time_s": 4.0}, **{**case, "bucket_size_mb": None})
    name, numbers = row("pair", numbers_of(record), numbers_of(rival, "rival_"), twice_s=8.0)
    template = "{strategy} {step_time_s} {rival_strategy} {rival_step_time_s} {twice_s} {absent_s}"
    finding = fill(name, template, numbers)
    assert finding.message == "ddp 25 MiB 2 s ddp 4 s 8 s unknown"
    assert finding.figures == {"step_time_s": 2.0, "rival_step_time_s": 4.0, "twice_s": 8.0}
    assert numbers_of(None) == {}
