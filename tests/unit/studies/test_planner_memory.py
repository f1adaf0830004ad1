"""Tests of the planner's memory against published peaks."""

import statistics

import pytest

from paceline.predict.cost.framework_memory import find_framework_memory
from studies.planner.memory import fit_constants, memory_cases, predict_peaks
from studies.planner.memory import held_out as hold_out


def test_published_peaks() -> None:
    cases = [case for case in memory_cases() if case.family in ("bloom", "torchtitan")]
    peaks = predict_peaks(cases)
    bloom = [each for each in peaks if each.case.family == "bloom" and each.measured]
    memory = find_framework_memory("bloom", "float16")
    constant, gaps = fit_constants(bloom)
    assert memory.constant_bytes == pytest.approx(constant, rel=0.01)
    assert memory.gaps == pytest.approx(gaps, rel=0.01)
    held_out = hold_out(peaks)
    for family, number, limit in (("bloom", 94, 0.03), ("torchtitan", 20, 0.045)):
        errors = [
            abs(each.predicted / each.measured - 1)
            for each in held_out
            if each.case.family == family and each.measured
        ]
        assert len(errors) == number
        assert statistics.median(errors) < limit
    failed = [each.verdict for each in held_out if each.case.run.unit == "OOM"]
    assert sorted(failed) == ["fits"] + 5 * ["refused"]


def test_no_published_run_is_refused() -> None:
    peaks = predict_peaks(memory_cases())
    ran = [each for each in peaks if each.case.run.unit != "OOM"]
    assert len(ran) > 2400
    assert [each.case.run.id for each in ran if each.verdict == "refused"] == []
