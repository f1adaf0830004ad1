"""Tests of the wording of findings."""

import pytest

from paceline.course.findings.template import against


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.03, "within 10% (+3%)"),
        (0.999, "within 10% (+0%)"),
        (1.5, "more (+50%)"),
        (0.8, "less (-20%)"),
    ],
)
def test_a_figure_is_compared_with_its_reference(value: float, text: str) -> None:
    assert against(value, 1.0) == text
