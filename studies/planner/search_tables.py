"""Tables of searches: best layouts, published layouts, large clusters, speed.

The records are those of `search.py` and `search_speed.py`.
"""

from collections.abc import Sequence

from paceline.core.units import format_count, to_gibibytes
from paceline.records import Record
from paceline.reports.tables.table import Table


def layouts_table(records: Sequence[Record]) -> Table:
    """Returns a row per layout of one search; `records` has the fastest first."""
    first = records[0]
    return Table(
        headers=("layout", "step (s)", "90% interval", *_HEADERS, "days", "device-hours"),
        rows=tuple(
            (
                str(record.case["layout"]),
                *_time(record),
                *_figures(record),
                f"{record.metrics['days'].value:.3g}",
                format_count(round(record.metrics["device_hours"].value)),
            )
            for record in records
        ),
        caption=(
            f"{_asked(first)}; {_value(first, 'num_candidates'):,.0f} layouts evaluated, the best "
            f"of each mesh shown; calibration {first.case['calibration']}; 10^12 tokens"
        ),
    )


def published_table(records: Sequence[Record]) -> Table:
    """Returns a row per record: layouts that the search found, and the published ones."""
    return Table(
        headers=("devices", "sequence", "", "layout", "step (s)", "90% interval", *_HEADERS),
        rows=tuple(
            (
                f"{record.case['devices']:,}",
                f"{record.case['context']:,}",
                _whose(record),
                str(record.case["layout"]),
                *_time(record),
                *_figures(record),
            )
            for record in records
        ),
        caption="Llama 3 405B in batches of 16M tokens: the search, and the mesh that Meta used",
    )


def recipes_table(records: Sequence[Record], caption: str) -> Table:
    """Returns a row per layout: search results, and published recipes with measurements."""
    return Table(
        headers=(
            "model, devices",
            "",
            "layout",
            "step (s)",
            "90% interval",
            "measured (s)",
            *_HEADERS,
        ),
        rows=tuple(
            (
                f"{record.case['model']}, {record.case['devices']}",
                "NVIDIA's recipe" if _measured(record) else "search",
                str(record.case["layout"]),
                *_time(record),
                _measured(record),
                *_figures(record),
            )
            for record in {_identity(record): record for record in records}.values()
        ),
        caption=caption,
    )


def batches_table(records: Sequence[Record]) -> Table:
    """Returns a row per batch size on a large cluster, with goodput."""
    first = records[0]
    return Table(
        headers=(
            *("tokens of a batch", "layout", "devices used", "step (s)", "90% interval"),
            *(*_HEADERS, "goodput", "days", "interruptions"),
        ),
        rows=tuple(
            (
                f"{int(str(record.case['batch_tokens'])) // 2**20}M",
                str(record.case["layout"]),
                f"{record.case['num_devices_used']:,}",
                *_time(record),
                *_figures(record),
                f"{_value(record, 'goodput'):.1%}",
                f"{_value(record, 'days'):.3g}",
                f"{_value(record, 'interruptions'):,.0f}",
            )
            for record in records
        ),
        caption=f"{first.case['model']} on {first.case['devices']:,} H100, 15.6 10^12 tokens",
    )


def speed_table(records: Sequence[Record]) -> Table:
    """Returns a row per timed search."""
    return Table(
        headers=("model", "devices", "layouts", "fit", "processor (s)", "resident peak"),
        rows=tuple(
            (
                str(record.case["model"]),
                f"{record.case['devices']:,}",
                f"{record.case['candidates']:,}",
                f"{_value(record, 'fitting_layouts'):,.0f}",
                f"{_value(record, 'processor_time_s'):.2f}",
                f"{_value(record, 'resident_peak_bytes') / 2**20:.0f} MiB",
            )
            for record in records
        ),
        caption="Exact searches on one core, seconds of processor time",
    )


_HEADERS = ("MFU", "memory (GiB)", "bubble", "exposed")


def _figures(record: Record) -> tuple[str, ...]:
    return (
        f"{_value(record, 'mfu'):.1%}",
        f"{to_gibibytes(_value(record, 'peak_bytes')):.1f}",
        f"{_value(record, 'bubble_share'):.1%}",
        f"{_value(record, 'exposed_share'):.1%}",
    )


def _time(record: Record) -> tuple[str, str]:
    time = record.metrics["step_time_s"]
    return f"{time.value:.3g}", f"{time.low:.3g} to {time.high:.3g}"


def _measured(record: Record) -> str:
    metric = record.metrics.get("measured_step_time_s")
    return "" if metric is None else f"{metric.value:.3g}"


def _identity(record: Record) -> tuple[object, ...]:
    return (record.case["model"], record.case["devices"], record.case["layout"], _measured(record))


def _whose(record: Record) -> str:
    if "measured_mfu" not in record.metrics:
        return "search"
    return f"Meta's mesh; measured MFU {_value(record, 'measured_mfu'):.1%}"


def _asked(record: Record) -> str:
    case = record.case
    tokens = int(str(case["batch_tokens"])) // 2**20
    return f"{case['model']} on {case['devices']} {case['device']}, batches of {tokens}M tokens"


def _value(record: Record, metric: str) -> float:
    return record.metrics[metric].value
