"""Tests of memory by category through the command line, against sizes computed by hand."""

import pathlib

import pytest

from paceline.records import Record, join_key
from tests import devices
from tests.end_to_end.test_communication import BIN, TORCHRUN, by_kind, run

SMALL = [
    *("bench", "memory", "--model", "bytes-34M", "--num-layers", "2", "--d-model", "64"),
    *("--num-heads", "2", "--batch", "2", "--context", "32", "--warmup", "1", "--steps", "2"),
    *("--json", "--device", devices.of_commands()),
]
# Two blocks of four square matrices, three of 64 x 2048 and two norms; a final norm; embedding and
# output layer of 256 x 64.
TENSORS = 2 * 9 + 3
PARAMETERS = 2 * (4 * 64**2 + 3 * 64 * 2048 + 2 * 64) + 64 + 2 * 256 * 64
# Cosines and sines of 16 angles at 2048 positions; tokens and targets.
BUFFERS = 2 * 2048 * 16 * 4 + 2 * 2 * 32 * 8
CATEGORIES = ("parameters", "gradients", "optimizer_state", "buffers", "activations")


def _bytes(record: Record, instant: str) -> list[float]:
    return [record.metrics[f"{instant}_{name}_bytes"].value for name in CATEGORIES]


def _by_strategy(records: list[Record]) -> dict[object, Record]:
    return {record.case["strategy"]: record for record in records}


@pytest.mark.slow
def test_every_byte_is_where_it_should_be(tmp_path: pathlib.Path) -> None:
    names = ("torch_ddp", "torch_zero", "zero1", "zero2", "fsdp")
    names += ("torch_fsdp2",)
    records = run(str(BIN / "paceline"), *SMALL, "--strategies", *names, cwd=tmp_path)
    measured = _by_strategy(by_kind(records, "optimizer"))
    assert tuple(measured) == names
    for record in measured.values():
        assert record.outcome == "ok", record.reason
        assert len(record.metrics["step_time_s"].samples) == 2
        assert record.metrics["optimizer_time_s"].value < record.metrics["step_time_s"].value
        for instant in ("after_init", "before_step", "after_step"):
            parts = _bytes(record, instant)
            assert min(parts) >= 0
            assert sum(parts) == record.metrics[f"peak_{instant}_bytes"].value
            assert record.metrics[f"resident_peak_{instant}_bytes"].value > sum(parts)

    assert _bytes(measured["torch_ddp"], "after_init") == [
        *(4 * PARAMETERS, 0, 0, BUFFERS + 4 * PARAMETERS, 0)
    ]
    assert _bytes(measured["torch_ddp"], "before_step")[:4] == [
        *(4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS + 4 * TENSORS, BUFFERS)
    ]
    # Each of two ranks has half of the moments, and step counters for its own tensors.
    flat = _bytes(measured["zero1"], "before_step")
    assert flat[:2] == [4 * PARAMETERS, 4 * (PARAMETERS + TENSORS)]
    assert 0 < flat[2] - 4 * PARAMETERS <= 4 * TENSORS
    assert flat[3] == BUFFERS
    halves = _bytes(measured["zero2"], "before_step")
    assert halves[:2] == [4 * PARAMETERS, 2 * PARAMETERS]
    for name in ("fsdp", "torch_fsdp2"):
        shards = _bytes(measured[name], "before_step")
        assert shards[0] == 2 * PARAMETERS
        assert shards[2] == 4 * PARAMETERS + 4 * TENSORS
        # fsdp appends, per tensor, how many ranks had a gradient.
        numbers = shards[1] - 2 * PARAMETERS
        assert 4 * TENSORS <= numbers <= 16 * TENSORS if name == "fsdp" else not numbers
        assert _bytes(measured[name], "after_init")[0] == 2 * PARAMETERS


@pytest.mark.slow
def test_predictions_stand_beside_what_they_predict(tmp_path: pathlib.Path) -> None:
    names = ("none", "ddp", "torch_ddp", "torch_zero", "zero1")
    records = run(str(BIN / "paceline"), *SMALL, "--strategies", *names, cwd=tmp_path)
    measured = {join_key(record): record for record in by_kind(records, "optimizer")}
    predicted = by_kind(records, "prediction")
    assert len(predicted) == len(measured) == len(names)
    for prediction in predicted:
        actual = measured[join_key(prediction)]
        for instant in ("after_init", "before_step", "after_step"):
            name = f"peak_{instant}_bytes"
            expected = prediction.metrics[name].value
            # Without buckets, gradients are allocated and freed one by one.
            tolerance = 0.05 if prediction.case["strategy"] == "none" else 1e-4
            assert actual.metrics[name].value == pytest.approx(expected, rel=tolerance)


@pytest.mark.slow
def test_under_torchrun(tmp_path: pathlib.Path) -> None:
    two = ["--strategies", "torch_ddp", "zero2"]
    records = run(*TORCHRUN, *SMALL, *two, cwd=tmp_path)
    assert len(by_kind(records, "optimizer")) == 2
    assert all(record.case["world_size"] == 2 for record in records)
    unsharded, sharded = by_kind(records, "optimizer")
    assert (
        sharded.metrics["peak_after_step_bytes"].value
        < 0.7 * unsharded.metrics["peak_after_step_bytes"].value
    )
