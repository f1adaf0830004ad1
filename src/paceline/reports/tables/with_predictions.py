"""Joins measured records with their predictions, for tables."""

from collections.abc import Sequence

import msgspec

from paceline.records import Metric, Record, join_key
from paceline.records.kinds import PREDICTION


def with_predictions(measured: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """Adds the predictions among `records` to the measurements of the same cases.

    For each metric ``x`` with a prediction, adds ``predicted_x`` and ``x_error``, the relative
    error of the prediction.
    """
    predictions = {join_key(record): record for record in records if record.kind == PREDICTION}
    return [_beside(record, predictions.get(join_key(record))) for record in measured]


def _beside(record: Record, prediction: Record | None) -> Record:
    if prediction is None or not record.metrics:
        return record
    added: dict[str, Metric] = {}
    for name, predicted in prediction.metrics.items():
        if name in record.metrics:
            added[f"predicted_{name}"] = Metric(value=predicted.value)
            if actual := record.metrics[name].value:
                added[f"{name}_error"] = Metric(value=predicted.value / actual - 1)
    return msgspec.structs.replace(record, metrics={**record.metrics, **added})
