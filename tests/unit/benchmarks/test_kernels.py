import os
import pathlib

import pytest

from paceline.benchmarks.config import KernelCase, KernelSweep
from paceline.benchmarks.harness.isolation import IsolatedRun
from paceline.benchmarks.kernels import KERNELS, _records, kernel_records
from paceline.core.errors import UsageError
from paceline.records import Record, RecordStore, find_kind

pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).parents[3]

# One configuration per compiler, with the widest head that must not spill. The slow test compiles
# these; `paceline bench kernels` compiles all configurations into results/kernels.jsonl.
SUBSET = KernelSweep(
    architecture=("sm80", "sm90", "sm100", "gfx942"),
    head_dim=(128,),
    mask=("causal",),
    lengths=("ragged",),
    group=(4,),
)
LIMITS = {"sm80": 166_912, "sm86": 101_376, "sm90": 232_448, "sm100": 232_448, "gfx942": 65_536}


def assert_sound(record: Record) -> None:
    """Checks the requirements of default configurations for head dimensions 64 and 128."""
    assert record.outcome == "ok", record.reason
    metrics = {name: metric.value for name, metric in record.metrics.items()}
    assert metrics["spill_bytes"] == 0, record.case
    assert metrics["shared_bytes"] <= LIMITS[str(record.case["architecture"])], record.case
    assert metrics["occupancy"] > 0, record.case
    if record.case["kernel"] != "delta":
        assert metrics["matrix_instructions"] > 0, record.case
        assert metrics["worst_bytes"] > metrics["best_bytes"]


@pytest.mark.slow
def test_default_configurations_neither_spill_nor_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    num_done = 0

    def on_progress(_completed: int, _total: int) -> None:
        nonlocal num_done
        num_done += 1

    records = list(kernel_records(SUBSET, on_progress))
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert num_done == 4
    assert [record.case["kernel"] for record in records] == [*KERNELS] * 4
    for record in records:
        assert_sound(record)
        assert set(record.case) == set(find_kind("kernel").join_key)


def test_a_compiler_that_fails_is_a_record() -> None:
    case = KernelCase(
        architecture="sm90", dtype="bfloat16", head_dim=64, mask="full", lengths="even", group=1
    )
    run: IsolatedRun[dict[str, dict[str, float]]] = IsolatedRun(outcome="failed", reason="crashed")
    records = list(_records(case, run, "3.7.1"))
    assert [record.outcome for record in records] == ["failed"] * len(KERNELS)
    assert not records[0].metrics
    assert records[0].case["block_keys"] is None


def test_heads_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(UsageError, match="--head-dim must be from 1 to 256"):
        KernelSweep(head_dim=(64, 512))


def test_the_committed_report_is_sound() -> None:
    records = list(RecordStore(ROOT / "results" / "kernels.jsonl").read())
    assert len(records) == 5 * 2 * 2 * 2 * 2 * len(KERNELS) * 2  # on two versions of Triton
    for record in records:
        assert_sound(record)
