"""Builds findings from message templates, and compares figures in one consistent way.

A message is formatted from the figures that the finding carries, so the two cannot disagree. The
suffix of a figure's name gives its unit. A verdict is "less", "more" or "alike". Two figures are
alike within 10%; two sets of samples are alike if there is no clear difference. With too few
samples, the verdict is "unknown".
"""

from typing import NamedTuple

from paceline.core.finding import Finding
from paceline.core.units import format_binary_bytes, format_decimal, format_seconds
from paceline.reports.evidence.comparison import Ratio, Standing

ALIKE = 0.1
"""Relative tolerance of all findings; figures within it count as alike."""
_RATES = {"flops_per_s": "FLOP/s", "bytes_per_s": "B/s"}
_LARGEST_COUNT = 1e9
"""Counts of at least this are written with an exponent."""


def make_finding(
    name: str, template: str, remedy: str = "", /, **values: float | str | Ratio | None
) -> Finding:
    """Returns a finding whose message is `template` filled with `values`.

    Numbers and ratios also become the finding's figures. A number is formatted by the unit in its
    name, unless its field has a format such as ``{result:.4f}``. None is written as "unknown".
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
    """Formats a ratio and its verdict, such as ``0.73 times (interval 0.72 to 0.75: less)``."""
    if ratio.standing == "unknown":
        samples = "1 sample" if ratio.num_samples == 1 else f"{ratio.num_samples} samples"
        return f"{ratio.value:.3g} times (from only {samples})"
    verdict = "no clear difference" if ratio.standing == "alike" else ratio.standing
    return f"{ratio.value:.3g} times (interval {ratio.low:.3g} to {ratio.high:.3g}: {verdict})"


def format_figure(name: str, value: float) -> str:
    """Formats a figure by the unit in its name, such as ``peak_bytes`` in GiB."""
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
    """Returns "less", "more", or "alike" if a figure is within `ALIKE` of the reference."""
    change = value / reference - 1
    if abs(change) <= ALIKE:
        return "alike"
    return "more" if change > 0 else "less"


def against(value: float, reference: float) -> str:
    """Formats the verdict with the difference, such as ``within 10% (+3%)``."""
    verdict = standing(value, reference)
    text = f"within {ALIKE:.0%}" if verdict == "alike" else verdict
    return f"{text} ({value / reference - 1:+z.0%})"
