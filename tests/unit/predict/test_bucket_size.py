"""Tests the cost, under contention, of a bucket size chosen without contention."""

import dataclasses
import pathlib
import statistics

import pytest

from paceline.accounting.overlap import NO_CONTENTION
from paceline.core import BatchShape
from paceline.core.presets import model_preset
from paceline.predict.calibration import calibrations
from paceline.predict.step import strategy_step_terms
from paceline.records import RecordStore

RESULTS = pathlib.Path(__file__).parents[3] / "results"
SIZES_MB = (0.25, 0.5, 1, 2, 3, 4, 5, 7, 10, 15, 25, 50, 100, 250, 1000)


def test_contention_hardly_changes_the_best_bucket_size() -> None:
    regrets = []
    for name in ("step-backtest", "step-backtest-4-ranks"):
        for machine in calibrations(RecordStore(RESULTS / f"{name}.jsonl").read()):
            if machine.world_size == 1:
                continue
            ideal = dataclasses.replace(
                machine, contentions=dict.fromkeys(machine.contentions, NO_CONTENTION)
            )
            for model in ("bytes-6M", "bytes-34M", "words-44M"):
                for num_sequences in (2, 5):
                    batch = BatchShape(num_sequences=num_sequences, context_length=128)
                    shape = model_preset(model)
                    step_s, ideal_s = (
                        {
                            size: strategy_step_terms(shape, batch, "ddp", on, size).total_s
                            for size in SIZES_MB
                        }
                        for on in (machine, ideal)
                    )
                    # Of sizes with equal cost, the largest sends the fewest messages.
                    chosen = min(SIZES_MB, key=lambda size: (ideal_s[size], -size))
                    regrets.append(step_s[chosen] / min(step_s.values()) - 1)
    assert len(regrets) == 24
    # The docstring of paceline.parallel.bucket_size quotes both numbers.
    assert max(regrets) == pytest.approx(0.022, abs=0.0005)
    assert statistics.mean(regrets) == pytest.approx(0.003, abs=0.0005)
