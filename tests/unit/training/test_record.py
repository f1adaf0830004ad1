"""Tests of the record of a finished run; foreign models are named, but not predicted."""

import dataclasses
import pathlib

import pytest
import torch

from paceline.data.loader.config import SourceConfig
from paceline.parallel import Session
from paceline.parallel.ranks.placement import local_placement
from paceline.records import RecordStore
from paceline.reports.tables.table import records_table, render_markdown
from paceline.training.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, StepConfig
from paceline.training.forecast import resolve
from paceline.training.metrics import EventRow, MetricsFile
from paceline.training.observers import FileObserver, RecordObserver, run_case
from paceline.training.run import expect
from tests.unit.training.row_factory import evaluation_row, expectation, started, step_row

_SESSION = Session(
    placement=local_placement("spawn", 0, 2), device=torch.device("cpu"), backend="gloo"
)


@pytest.fixture
def config(tmp_path: pathlib.Path) -> RunConfig:
    return RunConfig(
        out=str(tmp_path / "run"), data=DataConfig(sources=(SourceConfig(place="tokens"),))
    )


def test_only_a_finished_run_leaves_a_record(config: RunConfig) -> None:
    file = FileObserver(MetricsFile(pathlib.Path(config.out) / "metrics.jsonl"))
    record = RecordObserver(resolve(config, 2), _SESSION, expectation(step_time_s=0.4))
    store = RecordStore(pathlib.Path(config.out) / "record.jsonl")
    rows = [started(), step_row(1), step_row(2), step_row(3, memory_bytes=2**20), evaluation_row(3)]
    for row in [*rows, EventRow(step=3, name="stopped", message=".")]:
        file.log(row)
        record.log(row)
    assert not store.path.exists()
    record.log(EventRow(step=3, name="finished", message="."))
    (made,) = store.read()
    assert made.case["model"] == "bytes-6M"
    assert made.case["strategy"] == "ddp"
    table = render_markdown(records_table([made]))
    assert "| 4.9800 | 4.5000 | 1.2500 | 2,000 | 500 ± 0 | 400 | 1.00 MiB |" in table


def test_a_changed_preset_has_no_name(config: RunConfig) -> None:
    changed = dataclasses.replace(config, model=ModelConfig(num_layers=2))
    assert run_case(resolve(changed, 2), _SESSION)["model"] == "custom"


def test_layouts_of_different_speed_are_different_cases(config: RunConfig) -> None:
    layouts = [
        ParallelConfig(tensor=2),
        ParallelConfig(tensor=2, sequence_parallel=True),
        ParallelConfig(pipeline=2),
        ParallelConfig(pipeline=2, interleave=2),
    ]
    several = dataclasses.replace(config, training=StepConfig(batch_size=16, micro_batch_size=4))
    runs = [dataclasses.replace(several, parallel=layout) for layout in layouts]
    assert [run_case(resolve(run, 2), _SESSION)["layout"] for run in runs] == [
        "tensor 2",
        "tensor 2, sequence parallel",
        "pipeline 2",
        "pipeline 2, interleave 2",
    ]


def test_of_a_foreign_model_only_the_name_is_known(config: RunConfig) -> None:
    foreign = dataclasses.replace(config, model=ModelConfig(hugging_face="models/gpt2"))
    resolved = resolve(foreign, 2)
    case = run_case(resolved, _SESSION)
    assert (case["model"], case["d_model"], case["attention"]) == ("gpt2", None, "transformers")
    known = expect(resolved, _SESSION)
    assert (known.flops_per_step, known.memory_bytes) == (None, None)


def test_an_expectation_has_the_forecast(config: RunConfig) -> None:
    run = dataclasses.replace(
        config,
        training=StepConfig(batch_size=16, micro_batch_size=4),
        parallel=ParallelConfig(pipeline=2),
    )
    resolved = resolve(run, 2)
    predicted, known = resolved.forecast, expect(resolved, _SESSION)
    assert predicted is not None
    assert known.memory_bytes == predicted.memory.total
    assert known.corrected == predicted.corrected
    assert known.step_time is None
