"""Tests of the published runs: strict parsing, completeness and consistent sums."""

import collections
import json
import pathlib

import pytest

from paceline.core.errors import UsageError
from paceline.planner.published import PublishedRun, model_of, published_runs, read_rows, sources

ROW = {
    "framework": "own",
    "model": "llama3-8B",
    "device": "h100-sxm",
    "precision": "bf16",
    "devices": 8,
    "context_length": 8192,
    "global_batch": 64,
    "micro_batch": 1,
    "data": 8,
    "unit": "tokens/s/device",
    "measured": 8000.0,
}


def _of(*beginnings: str) -> list[PublishedRun]:
    return [run for run in published_runs() if run.source.startswith(beginnings)]


def test_all_rows_are_there_by_source() -> None:
    counted = collections.Counter(
        run.source.rstrip("0123456789").rstrip("-.") for run in published_runs()
    )
    assert counted["vtrain"] == 1549
    assert counted["megatron-bridge"] == 282
    assert counted["dgxc-benchmarking"] == 222
    assert counted["llm-foundry"] == 216
    assert counted["bigscience"] == 140
    assert sum(counted.values()) == 2691
    assert len({run.id for run in published_runs()}) == 2691
    assert {run.source for run in published_runs()} == set(sources())


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ("vtrain", 1549),
        ("bigscience", 139),
        ("internevo", 48),
        ("llm-foundry", 216),
        ("dgxc", 222),
        ("torchtitan", 32),
    ],
)
def test_axes_multiply_to_the_devices(source: str, rows: int) -> None:
    assert sum(run.axes_product == run.devices for run in _of(source)) == rows


def test_llm_foundry_passes_and_rates_add_up() -> None:
    for run in _of("llm-foundry"):
        assert run.data is not None
        assert run.global_batch == run.micro_batch * run.data * run.also["grad_accum"]  # type: ignore[operator]
        assert run.measured is not None
        model = model_of(run)
        assert model is not None
        assert run.context_length is not None
        attention = 12 * model.num_layers * model.d_model * run.context_length
        flops = run.measured * (6 * run.also["num_params"] + attention)
        assert flops / 1e12 == pytest.approx(run.also["model_tflops"], rel=0.02)


def test_bloom_tflops_are_megatrons_formula() -> None:
    off = []
    for run in _of("bigscience"):
        model = model_of(run)
        if run.measured is None or "tflops" not in run.also or run.marks or model is None:
            continue
        h, layers, vocabulary, s = model.d_model, model.num_layers, model.vocab_size, 2048
        assert run.global_batch is not None
        assert run.devices is not None
        flops = 96 * run.global_batch * s * layers * h**2
        flops *= 1 + s / (6 * h) + vocabulary / (16 * layers * h)
        off.append(flops / run.measured / run.devices / 1e12 / run.also["tflops"] - 1)
    assert len(off) > 100
    assert sum(abs(each) < 0.05 for each in off) > 0.9 * len(off)


def _write(path: pathlib.Path, **changes: object) -> pathlib.Path:
    path.write_text(json.dumps({**ROW, **changes}) + "\n", encoding="utf-8")
    return path


def test_own_rows_are_read(tmp_path: pathlib.Path) -> None:
    (run,) = read_rows(_write(tmp_path / "rows.jsonl"))
    assert run.step_s == pytest.approx(64 * 8192 / (8000 * 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 8}, "line 1: .*gpus"),
        ({"devices": "eight"}, "line 1: .*int"),
        ({"devices": "8"}, r"line 1: Expected `int \| null`, got `str` - at `\$.devices`"),
        ({"measured": "8000"}, r"line 1: .*got `str` - at `\$.measured`"),
        ({"sequence_parallel": "true"}, r"line 1: .*got `str` - at `\$.sequence_parallel`"),
        ({"sequence_parallel": 1}, r"line 1: .*got `int` - at `\$.sequence_parallel`"),
        ({"network_bytes_per_s": 0}, "network_bytes_per_s is 0.0; it must be positive"),
        ({"recompute": "ful"}, "line 1: recompute is 'ful'; did you mean 'full'"),
        ({"precision": "bf61"}, "line 1: precision is 'bf61'; did you mean 'bf16'"),
        ({"precision": "float32"}, "line 1: precision is 'float32'; .*known: bfloat16"),
        ({"measured": -1.0}, "measured is -1.0"),
        ({"data": 0}, "data is 0"),
        ({"unit": "OOM"}, "not both"),
        ({"model": "llama9"}, "unknown model 'llama9'"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: pathlib.Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_rows(_write(tmp_path / "rows.jsonl", **changes))


@pytest.mark.parametrize("run", published_runs()[::97], ids=lambda run: run.id)
def test_words_of_published_rows_may_be_used_in_own_ones(
    tmp_path: pathlib.Path, run: PublishedRun
) -> None:
    words = {"recompute": run.recompute, "precision": run.precision, "overlap": run.overlap}
    (own,) = read_rows(_write(tmp_path / "rows.jsonl", **words))
    assert (own.recompute, own.precision) == (run.recompute, run.precision)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"nowhere.jsonl: no such file"):
        read_rows("nowhere.jsonl")
