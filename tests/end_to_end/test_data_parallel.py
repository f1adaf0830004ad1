"""Tests of comparing strategies: on the command's own ranks, torchrun's and the lab's."""

import pathlib

import pytest

from paceline.core.units import MIB
from tests import devices
from tests.end_to_end.test_communication import BIN, TORCHRUN, by_kind, require_lab, run

SMALL = [
    *("bench", "ddp", "--model", "bytes-34M", "--num-layers", "1", "--d-model", "64"),
    *("--num-heads", "2", "--batch", "1", "--context", "16", "--rounds", "3", "--json"),
    *("--device", devices.of_commands()),
]


def test_on_ranks_of_its_own(tmp_path: pathlib.Path) -> None:
    strategies = ["--strategies", "torch_ddp", "none", "naive", "flat", "overlapped", "ddp"]
    sizes = ["--bucket-size-mb", "0.1", "auto"]
    records = run(str(BIN / "paceline"), *SMALL, *strategies, *sizes, cwd=tmp_path)
    measured = by_kind(records, "ddp")
    assert [(record.case["strategy"], record.case["bucket_size_mb"]) for record in measured] == [
        ("torch_ddp", 0.1),
        ("none", None),
        ("naive", None),
        ("flat", None),
        ("overlapped", None),
        ("ddp", 0.1),
        ("ddp", "auto"),
    ]
    for record in measured:
        assert record.outcome == "ok"
        assert record.case["baseline"] == "torch_ddp 0.1 MiB"
        assert len(record.metrics["step_time_s"].samples) == 3
        assert record.metrics["exposed_communication_s"].value >= 0
        assert ("communication_s" in record.metrics) == (record.case["strategy"] != "none")
        assert ("step_time_ratio" in record.metrics) == (record is not measured[0])
        phases = ("forward_time_s", "backward_time_s", "optimizer_time_s")
        assert sum(record.metrics[name].value for name in phases) > 0
    # Paceline stores one four-byte number with each gradient; torch keeps such a list elsewhere.
    torch_ddp, *others = [record.metrics["gradient_bytes"].value for record in measured]
    num_parameters = measured[2].metrics["num_messages"].value
    assert all(torch_ddp <= own <= torch_ddp + 4 * num_parameters for own in others)
    peaks = [record.metrics["peak_before_optimizer_bytes"].value for record in measured]
    # Gradients are copied into buckets in groups of up to 1 MiB, and exist twice meanwhile.
    assert max(peaks[2:]) <= peaks[0] + 4 * num_parameters + MIB
    predicted = by_kind(records, "prediction")
    assert len(predicted) > 10
    assert measured[-1].metrics["chosen_bucket_size_mb"].value in {
        record.case["bucket_size_mb"] for record in predicted
    }


@pytest.mark.slow
def test_under_torchrun(tmp_path: pathlib.Path) -> None:
    records = run(*TORCHRUN, *SMALL, cwd=tmp_path)
    assert len(by_kind(records, "ddp")) == 2
    assert all(record.case["world_size"] == 2 for record in records)


@pytest.mark.slow
def test_in_the_lab_every_record_knows_its_link(tmp_path: pathlib.Path) -> None:
    require_lab()
    lab = [str(BIN / "paceline"), "lab", "run", "--hosts", "2", "--rate", "100mbit", "--"]
    flat = ["--strategies", "none", "flat"]
    records = run(*lab, str(BIN / "paceline"), *SMALL, *flat, cwd=tmp_path)
    without, with_flat = by_kind(records, "ddp")
    assert with_flat.case["link_rate_bits_per_s"] == 1e8
    # 576 kB at 100 Mbit/s take 46 ms on the wire, fully exposed.
    seconds = with_flat.metrics["gradient_bytes"].value * 8 / 1e8
    assert with_flat.metrics["exposed_communication_s"].value > 0.9 * seconds
    assert with_flat.metrics["communication_s"].value > 0.9 * seconds
    assert without.metrics["exposed_communication_s"].value < 0.1 * seconds
