"""Tests that `tests.check_records` writes a record of every test, regardless of its outcome."""

import pathlib
import subprocess
import sys

import pytest

from paceline.records import RecordStore

ROOT = pathlib.Path(__file__).parents[2]

_CHECKS = """
import pytest

def test_good(record_property):
    record_property("peak_bytes", 12)

def test_bad():
    assert 1 == 2, "the sum is wrong"

@pytest.mark.skip(reason="needs two GPUs")
def test_absent():
    pass

@pytest.fixture
def broken():
    raise RuntimeError("no NCCL")

def test_unreached(broken):
    pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_outcome_is_one_record(workers: str, tmp_path: pathlib.Path) -> None:
    checks, store = tmp_path / "test_checks.py", tmp_path / "checks.jsonl"
    checks.write_text(_CHECKS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "tests.check_records"]
    result = subprocess.run(
        [*command, "--check-records", store, "--rootdir", tmp_path, checks],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout
    assert len(list(RecordStore(store).read())) == 4
    records = {str(r.case["name"]).rpartition("::")[2]: r for r in RecordStore(store).read()}
    outcomes = {name: record.outcome for name, record in records.items()}
    assert outcomes == {
        "test_good": "ok",
        "test_bad": "failed",
        "test_absent": "skipped",
        "test_unreached": "failed",
    }
    assert records["test_good"].metrics["peak_bytes"].value == 12
    assert "the sum is wrong" in str(records["test_bad"].reason)
    assert "needs two GPUs" in str(records["test_absent"].reason)
    assert "no NCCL" in str(records["test_unreached"].reason)
