"""Case fields of records: which vary and which are shared, their texts, and the model in them."""

import re
from collections.abc import Sequence

from paceline.accounting import count_parameters
from paceline.core.errors import UsageError
from paceline.core.units import format_decimal
from paceline.records import CaseValue, Record
from paceline.records.kinds import (
    COMPRESSION,
    LINK_RATE,
    MEASURED_LINK_RATE,
    MEASURED_RATES,
    MEASURED_SITE_RATE,
    MODEL_FIELDS,
    SITE_RATE,
)
from paceline.records.schema import model_of_case

# A named model implies its dimensions, so these are shown only for unnamed shapes.
_DIMENSIONS = MODEL_FIELDS[1:]
_UNNAMED = "custom"
_UNIT_SUFFIXES = {"_bits_per_s": "bit/s", "_bytes": "B"}
# Unit suffix of bucket sizes. As in torch and the courses, "mb" means 2^20 bytes.
_MEBIBYTES = "_mb"
# Default values that are not worth showing.
_UNREMARKABLE = {
    "float32_matmul_precision": "highest",
    "activation_checkpointing": "none",
    "optimizer": "adamw",
}


def single_kind(records: Sequence[Record]) -> str:
    """Returns the common kind of all records; raises UsageError if there is not exactly one."""
    kinds = sorted({record.kind for record in records})
    if len(kinds) != 1:
        found = ", ".join(kinds) or "no records"
        raise UsageError(f"one kind of record is needed, found {found}; choose with --kind")
    return kinds[0]


def split_fields(records: Sequence[Record]) -> tuple[dict[str, CaseValue], list[str]]:
    """Splits the case fields into those with one common value and those that vary."""
    shared: dict[str, CaseValue] = {}
    varying: list[str] = []
    single_kind(records)
    for field in records[0].measured_kind.case_fields:
        if field in _DIMENSIONS and all(_is_named(record) for record in records):
            continue
        values = {record.case.get(field) for record in records}
        if len(values) > 1:
            varying.append(field)
        elif (value := values.pop()) != _UNREMARKABLE.get(field):
            shared[field] = value
    for measured, rate in ((MEASURED_LINK_RATE, LINK_RATE), (MEASURED_SITE_RATE, SITE_RATE)):
        if measured in varying and rate not in varying:
            # Every command measures this rate again, so it does not distinguish cases.
            varying.remove(measured)
    return shared, varying


def describe_fields(fields: dict[str, CaseValue]) -> str:
    """Formats fields as a phrase, such as ``batch 4, precision float32``."""
    return ", ".join(
        f"{field_label(name)} {field_text(name, value)}" for name, value in fields.items()
    )


def describe_case(record: Record, varying: Sequence[str], separator: str = ", ") -> str:
    """Returns a name for a record, from the varying fields that apply to it."""
    case = record.case
    parts = [
        str(case[field])
        if field in ("model", "precision", "phase", "operation")
        else f"{field_label(field)} {field_text(field, case.get(field))}"
        for field in varying
        if case.get(field) is not None or field == LINK_RATE
    ]
    return separator.join(parts) or str(case.get("model") or case.get("operation") or record.kind)


def strategy_text(record: Record) -> str:
    """Returns the name of a strategy, with its compression and bucket size if it has them."""
    size = record.case["bucket_size_mb"]
    name = str(record.case["strategy"])
    if (compression := record.case.get(COMPRESSION)) is not None:
        name = f"{name} {compression}"
    return name if size is None else f"{name} {field_text('bucket_size_mb', size)}"


def strategy_case(record: Record, varying: Sequence[str]) -> str:
    """Returns a name for a record: strategy, bucket size, and other varying fields."""
    named = ("strategy", COMPRESSION, "bucket_size_mb")
    others = [field for field in varying if field not in named]
    name = strategy_text(record)
    return f"{name}, {describe_case(record, others)}" if others else name


def split_series(records: Sequence[Record], x_field: str) -> dict[str, list[Record]]:
    """Groups measured records into the lines of a plot, one per combination of varying fields.

    Each line is sorted by `x_field` and named by the other varying fields.
    """
    _shared, varying = split_fields(records)
    apart = [field for field in varying if field not in (x_field, *MEASURED_RATES)]
    series: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: case_number(record, x_field)):
        if record.metrics:
            series.setdefault(describe_case(record, apart), []).append(record)
    return series


def case_number(record: Record, field: str) -> float:
    """Returns a numeric case field; raises UsageError if it is not a number."""
    value = record.case[field]
    if not isinstance(value, int | float):
        raise UsageError(f"case.{field} of a {record.kind!r} record is {value!r}, not a number")
    return value


def field_label(field: str) -> str:
    """Returns the display name of a case field, without the unit, which `field_text` adds."""
    for suffix in (*_UNIT_SUFFIXES, _MEBIBYTES):
        field = field.removesuffix(suffix)
    return field.replace("_", " ")


def field_text(field: str, value: CaseValue) -> str:
    """Returns the display text of a case field's value."""
    if value is None:
        return {LINK_RATE: "unshaped", COMPRESSION: "none"}.get(field, "n/a")
    for suffix, unit in _UNIT_SUFFIXES.items():
        if field.endswith(suffix) and isinstance(value, int | float):
            return format_decimal(value, unit)
    if field.endswith(_MEBIBYTES) and isinstance(value, int | float):
        return f"{value:g} MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_named(record: Record) -> bool:
    return "model" in record.case and record.case["model"] != _UNNAMED


def num_parameters(record: Record) -> int:
    """Returns the number of parameters of a case's model; 0 if its dimensions are unknown."""
    shape = model_of_case(record.case)
    return 0 if shape is None else count_parameters(shape).total


def model_key(record: Record) -> tuple[CaseValue, ...]:
    """Returns a key that identifies a model; unnamed shapes differ only in their dimensions."""
    return tuple(record.case.get(field) for field in MODEL_FIELDS)


def model_name(record: Record) -> str:
    """Returns the name of a model, with its number of parameters if it is unnamed."""
    name = str(record.case["model"])
    if name != _UNNAMED:
        return name
    return f"{name} ({format_decimal(num_parameters(record), '').strip()} parameters)"


_DIRECTORIES = re.compile(r"(?<![\w.:/])/(?:[^/\s\"'<>|;,]+/)+")


def without_directories(text: str) -> str:
    """Shortens absolute paths to the names of their files; what is relative or a URL stays."""
    return _DIRECTORIES.sub("…/", text)
