"""Tests of collectives through the command line: on its own ranks, torchrun's and the lab's."""

import os
import pathlib
import subprocess
import sys

import pytest

from paceline.lab import LabError, LinkShape, hosts
from paceline.records import Record
from paceline.records.store import decode_record
from tests import devices

BIN = pathlib.Path(sys.executable).parent
TORCHRUN = [*(str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"), *("-m", "paceline")]
SMALL = ["bench", "comm", "--sizes", "10KB", "1MB", "--steps", "3", "--json"]
SMALL += ["--device", devices.of_commands()]


def run(*command: str, cwd: pathlib.Path) -> list[Record]:
    result = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    assert result.returncode == 0, result.stderr
    return [decode_record(line.encode()) for line in result.stdout.splitlines()]


def require_lab() -> None:
    """Skips a test, with the reason, if the machine cannot create hosts with shaped links."""
    try:
        with hosts(1, LinkShape(rate_bits_per_s=1e9)):
            pass
    except LabError as error:
        pytest.skip(str(error))


def by_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record.kind == kind]


def test_on_ranks_of_its_own(tmp_path: pathlib.Path) -> None:
    operations = ["--operations", "all_reduce", "broadcast", "--world-sizes", "2", "3"]
    records = run(str(BIN / "paceline"), *SMALL, *operations, cwd=tmp_path)
    measured = by_kind(records, "comm")
    assert len(measured) == 8
    assert {record.case["world_size"] for record in measured} == {2, 3}
    for record in measured:
        assert record.outcome == "ok"
        assert len(record.metrics["time_s"].samples) == 3
        assert record.metrics["bus_bandwidth_bytes_per_s"].value > 0
        assert "link_rate_bits_per_s" not in record.case
    assert len(by_kind(records, "collective_fit")) == 4
    stored = (tmp_path / "paceline-records.jsonl").read_text().splitlines()
    assert len(stored) == 12


@pytest.mark.slow
def test_under_torchrun(tmp_path: pathlib.Path) -> None:
    records = run(*TORCHRUN, *SMALL, cwd=tmp_path)
    assert len(by_kind(records, "comm")) == 2
    assert all(record.case["world_size"] == 2 for record in records)


@pytest.mark.slow
def test_in_the_lab_every_record_knows_its_link(tmp_path: pathlib.Path) -> None:
    require_lab()
    lab = [str(BIN / "paceline"), "lab", "run", "--hosts", "2", "--rate", "500mbit", "--"]
    records = run(*lab, str(BIN / "paceline"), *SMALL, cwd=tmp_path)
    assert len(by_kind(records, "comm")) == 2
    for record in records:
        assert record.case["link_rate_bits_per_s"] == 5e8
        assert record.case["measured_link_rate_bits_per_s"] == pytest.approx(4.78e8, rel=0.1)
        assert record.case["num_hosts"] == 2
    # A megabyte at 500 Mbit/s takes 16 ms on the wire, plus headers.
    largest = by_kind(records, "comm")[-1]
    assert largest.metrics["time_s"].value > 0.014
