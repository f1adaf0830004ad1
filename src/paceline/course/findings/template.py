"""How a finding is made: one template, filled with its own figures, and one way to judge them.

The figures of a message are those that the finding carries, written by the units in their names, so
that the two cannot differ. A verdict is less, more, or that there is no difference to speak of:
within 10% for two figures, no clear difference for two sets of samples; too few samples: unknown.
"""

from typing import NamedTuple

from paceline.core.finding import Finding
from paceline.core.units import format_binary_bytes, format_decimal, format_seconds
from paceline.reports.evidence.comparison import Ratio, Standing

ALIKE = 0.1
"""The one threshold of all findings: figures that differ by no more than this share agree."""
_RATES = {"flops_per_s": "FLOP/s", "bytes_per_s": "B/s"}
_LARGEST_COUNT = 1e9
"""What is larger is written with an exponent."""


def make_finding(
    name: str, template: str, remedy: str = "", /, **values: float | str | Ratio | None
) -> Finding:
    """Fills a template with words, and with numbers and ratios, which are the finding's figures.

    A number is written by the unit in its name, unless its field has a format such as
    ``{result:.4f}``; None is unknown.
    """
    figures: dict[str, float] = {}
    texts: dict[str, object] = {}
    for key, value in values.items():
        if value is None:
            texts[key] = "unknown"
        elif isinstance(value, str):
            texts[key] = value
        elif isinstance(value, Ratio):
            texts[key] = format_ratio(value)
            figures |= {key: value.value, f"{key}_low": value.low, f"{key}_high": value.high}
        else:
            texts[key] = _Figure(key, value)
            figures[key] = value
    return Finding(name=name, message=template.format(**texts), remedy=remedy, figures=figures)


class _Figure(NamedTuple):
    name: str
    value: float

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else format_figure(self.name, self.value)


def format_ratio(ratio: Ratio) -> str:
    """Writes a ratio and its verdict, such as ``0.73 times (interval 0.72 to 0.75: less)``."""
    if ratio.standing == "unknown":
        return f"{ratio.value:.3g} times (unknown: too few samples, {ratio.num_samples})"
    verdict = "no clear difference" if ratio.standing == "alike" else ratio.standing
    return f"{ratio.value:.3g} times (interval {ratio.low:.3g} to {ratio.high:.3g}: {verdict})"


def format_figure(name: str, value: float) -> str:
    """Writes a figure by the unit in its name, such as ``peak_bytes`` in GiB."""
    for suffix, unit in _RATES.items():
        if name.endswith(suffix):
            return format_decimal(value, unit)
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_binary_bytes(value)
    if name.endswith("share"):
        return f"{value:.0%}"
    if value == round(value) and abs(value) < _LARGEST_COUNT:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def standing(value: float, reference: float) -> Standing:
    """Says whether a figure is less than a reference, more, or alike."""
    change = value / reference - 1
    if abs(change) <= ALIKE:
        return "alike"
    return "more" if change > 0 else "less"


def against(value: float, reference: float) -> str:
    """Writes the verdict with the difference, such as ``within 10% (+3%)``."""
    verdict = standing(value, reference)
    text = f"within {ALIKE:.0%}" if verdict == "alike" else verdict
    return f"{text} ({value / reference - 1:+.0%})"
