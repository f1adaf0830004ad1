"""Step times of rows from the logs of trainers, TensorBoard, Weights & Biases and Paceline."""

import json
import pathlib

import pytest

from paceline.core.errors import UsageError
from paceline.planner.logs import read_log
from paceline.planner.published import read_rows

ROW = {
    "framework": "my-trainer",
    "model": "llama3-8B",
    "device": "h100-sxm",
    "precision": "bf16",
    "devices": 8,
    "context_length": 8192,
    "global_batch": 64,
    "micro_batch": 1,
    "data": 8,
}

TORCHTITAN = "".join(
    f"\x1b[31mstep: {step:2}  \x1b[32mloss: 9.12  \x1b[33mmemory: 47.7GiB(60.0%)  "
    f"\x1b[34mtps: {rate:,}  \x1b[36mtflops: 334.5  \x1b[35mmfu: 33.8%\x1b[39m\n"
    for step, rate in ((1, 900), (10, 5700), (20, 5900), (30, 5800))
)
MEGATRON = """\
------------------------ arguments ------------------------
  context_parallel_size ........................... 1
  data_parallel_size .............................. 2
  global_batch_size ............................... 64
  micro_batch_size ................................ 2
  pipeline_model_parallel_size .................... 2
  recompute_granularity ........................... selective
  seq_length ...................................... 4096
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 4
  use_distributed_optimizer ....................... True
  virtual_pipeline_model_parallel_size ............ 4
  world_size ...................................... 16
-------------------- end of arguments ---------------------
 iteration 10/ 40 | consumed samples: 640 | elapsed time per iteration (ms): 9356.2 | lm loss: 9 |
 iteration 20/ 40 | consumed samples: 1280 | elapsed time per iteration (ms): 1300.0 | lm loss: 8 |
 iteration 30/ 40 | consumed samples: 1920 | elapsed time per iteration (ms): 1310.0 | lm loss: 7 |
 iteration 40/ 40 | consumed samples: 2560 | elapsed time per iteration (ms): 1290.0 | lm loss: 6 |
"""
NEMO = "".join(
    f"Training epoch 0, iteration {step}/9 | global_step: {step} | reduced_train_loss: 11.0 | "
    f"train_step_timing in s: {seconds}\n"
    for step, seconds in enumerate((31.2, 7.1, 7.3))
)
NEMO_1 = "Epoch 0: 3%| | 90/300 [1:42<5:37, global_step=9e+3, train_step_timing in s=0.615]\n"
CHART = '"Step","a run - train_step_timing in s"\n"0","40"\n"1","7.0"\n"2",""\n"3","7.4"\n'
HISTORY = '{"_step": 0, "throughput(tps)": 10}\n{"_step": 1, "throughput(tps)": 5800.0}\n'
BRIDGE = "Step Time : 14.26s GPU utilization: 58.2TFLOP/s/GPU\n" * 2


@pytest.mark.parametrize(
    ("text", "unit", "measured"),
    [
        (TORCHTITAN, "tokens/s/device", 5800),
        (MEGATRON, "s/iteration", 1.3),
        (NEMO, "s/iteration", 7.2),
        (NEMO_1, "s/iteration", 0.615),
        (BRIDGE, "s/iteration", 14.26),
        (CHART, "s/iteration", 7.2),
        (HISTORY, "tokens/s/device", 5800),
    ],
)
def test_the_median_without_the_first_steps_is_read(
    text: str, unit: str, measured: float, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "output"
    path.write_text(text)
    found = read_log(path)
    assert (found.unit, found.measured) == (unit, pytest.approx(measured))


def test_the_arguments_of_megatron_fill_a_row(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.log").write_text(MEGATRON)
    row = {name: ROW[name] for name in ("framework", "model", "device", "precision")}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"log": "train.log", "devices": 32}))
    (read,) = read_rows(tmp_path / "rows.jsonl")
    assert read.step_s == pytest.approx(1.3)
    axes = (read.tensor, read.pipeline, read.interleave, read.data, read.zero)
    assert axes == (4, 2, 4, 2, 1)
    assert (read.context_length, read.global_batch, read.micro_batch) == (4096, 64, 2)
    assert (read.sequence_parallel, read.recompute) == (True, "selective")
    assert read.devices == 32  # The row's own field wins.


def test_an_event_file_of_tensorboard_is_read(tmp_path: pathlib.Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:  # type: ignore[no-untyped-call]
        for step, value in enumerate((100.0, 5000.0, 5200.0)):
            writer.add_scalar("rank_0/throughput(tps)", value, step)  # type: ignore[no-untyped-call]
    found = read_log(tmp_path / "tb")
    assert (found.unit, found.measured) == ("tokens/s/device", 5100)
    (file,) = (tmp_path / "tb").iterdir()
    assert read_log(file) == found


def test_a_run_of_paceline_states_its_batch(tmp_path: pathlib.Path) -> None:
    demo = pathlib.Path(__file__).parents[3] / "results" / "demo" / "run"
    found = read_log(demo)
    assert found == read_log(demo / "record.jsonl")
    assert found.measured == pytest.approx(0.1656, rel=1e-3)
    assert found.fields["devices"] == 2
    assert found.fields["global_batch"] == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step 1 took long\n", "no step times in it; known are logs of torchtitan"),
        ('{"loss": 3}\n', r"none of the series throughput\(tps\).*it has loss"),
        ('"Step","a - tps","b - tps"\n"0","1","2"\n', "2 runs in one export"),
    ],
)
def test_a_log_without_times_gets_the_remedy(
    text: str, message: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_log(tmp_path / "log")


def test_a_row_has_a_log_or_a_value(tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**ROW, "log": "log", "measured": 3, "unit": "s/iteration"}))
    with pytest.raises(UsageError, match="give a log, or measured and unit, not both"):
        read_rows(rows)
    rows.write_text(json.dumps({**ROW, "log": "nowhere"}))
    with pytest.raises(UsageError, match="nowhere: no such file"):
        read_rows(rows)
