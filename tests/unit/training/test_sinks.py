"""Tests that trackers receive a run's metrics, and that missing or failing ones are named."""

import pathlib
import shutil
import sys
import time

import pytest

from paceline.core.errors import UsageError
from paceline.data.loader.config import SourceConfig
from paceline.training.config import DataConfig, LoggingConfig, RunConfig, SinkName
from paceline.training.metrics import EventRow
from paceline.training.observers import Observer, Observers
from paceline.training.sinks import make_sinks, require_sinks
from tests.unit.training.row_factory import evaluation_row, expectation, started, step_row


def _sink(directory: pathlib.Path, name: SinkName) -> Observer:
    config = RunConfig(
        out=str(directory),
        data=DataConfig(sources=(SourceConfig(place="tokens"),)),
        logging=LoggingConfig(every_steps=2, sinks=(name,)),
    )
    expected = expectation(step_time_s=0.4, peak_flops_per_s=1e10)
    (sink,) = make_sinks(config, directory, expected)
    return sink


def _train(sink: Observer, first: int, last: int, *, end: str = "finished") -> None:
    """Sends a sink the rows of an attempt from step `first` to step `last`."""
    sink.log(started(first))
    for step in range(first + 1, last + 1):
        sink.log(step_row(step, memory_bytes=2**20))
    sink.log(evaluation_row(last, sample="All this happened"))
    sink.log(EventRow(step=last, name=end, message="."))
    sink.close()


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UsageError, match=r"tensorboard, which is not .*'paceline\[tensorboard\]'"):
        require_sinks(["tensorboard"])
    # W&B's output directory in the working directory is not the package.
    (tmp_path / "wandb").mkdir()
    with pytest.raises(UsageError, match="wandb, which is not installed"):
        require_sinks(["wandb"])
    require_sinks([])


def test_tensorboard_shows_a_resumed_run_once(tmp_path: pathlib.Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _train(_sink(tmp_path, "tensorboard"), 0, 4)
    _train(_sink(tmp_path, "tensorboard"), 2, 6)
    shown = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert shown.Scalars("speed/model_flops_utilization")[0].value == pytest.approx(0.2)
    assert shown.Scalars("time/predicted_step_s")[0].value == pytest.approx(0.4)
    assert shown.Scalars("heldout/bits_per_byte")[-1].value == 1.25
    assert {"sample/text_summary", "config/text_summary"} <= set(shown.Tags()["tensors"])


def test_wandb_works_without_a_network(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for first, last in ((0, 4), (2, 6)):
        _train(_sink(tmp_path, "wandb"), first, last)
    # Both attempts are one run, which W&B merges on upload.
    name = (tmp_path / "wandb" / "run-id").read_text(encoding="utf-8")
    kept = list((tmp_path / "wandb").glob("offline-run-*"))
    assert {place.name.rpartition("-")[2] for place in kept} == {name}
    deadline = time.monotonic() + 60
    for place in kept:
        (file,) = place.glob("*.wandb")
        while file.stat().st_size <= 1000:  # W&B's own process writes what it was given.
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_mlflow_keeps_a_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    _train(_sink(tmp_path, "mlflow"), 0, 4, end="stopped")
    (run,) = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    assert run.info.status == "KILLED"
    _train(_sink(tmp_path, "mlflow"), 4, 6)
    (run,) = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.steps"] == "200"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in losses] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_credentials_of_trackers_are_written_nowhere(
    name: SinkName,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(name)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    variables = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY")
    secrets = {variable: f"canary{number}" * 5 for number, variable in enumerate(variables)}
    secrets["WANDB_API_KEY"] = "cafe" * 10  # The client checks its length and letters.
    for variable, secret in secrets.items():
        monkeypatch.setenv(variable, secret)
    _train(_sink(tmp_path, name), 0, 4)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    written = b"".join(path.read_bytes() for path in files) + "".join(capfd.readouterr()).encode()
    assert not [variable for variable, secret in secrets.items() if secret.encode() in written]


def test_training_goes_on_when_a_tracker_dies(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    lines: list[str] = []
    observers = Observers([_sink(tmp_path, "mlflow")], lines.append)
    observers.log(started())
    shutil.rmtree(tmp_path / "mlflow")
    for step in range(1, 6):
        observers.log(step_row(step))
    observers.close()
    assert len(lines) == 1
    assert lines[0].startswith("paceline: MlflowSink failed at step 2 and gets no more metrics")
