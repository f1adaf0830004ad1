"""Tests of single-process benchmarks and of `env` through their real entry point."""

import json
import pathlib
import subprocess
import sys

import pytest

from paceline.records.store import decode_record
from tests import devices
from tests.end_to_end.test_command_line import FAST, paceline


def test_bench_step_prints_one_record_and_stores_it(tmp_path: pathlib.Path) -> None:
    result = paceline(
        *("bench", "step", *FAST, "--warmup", "1", "--steps", "2", "--phase", "train", "--json"),
        cwd=tmp_path,
    )
    (line,) = result.stdout.splitlines()
    record = decode_record(line.encode())
    assert record.outcome == "ok"
    assert record.case["phase"] == "train"
    assert len(record.metrics["step_time_s"].samples) == 2
    assert result.stderr == ""
    assert (tmp_path / "paceline-records.jsonl").read_text() == result.stdout


@pytest.mark.slow
def test_a_sweep_becomes_a_table_and_plots(tmp_path: pathlib.Path) -> None:
    store = ["--store", "deep/records.jsonl"]
    result = paceline(
        *("bench", "step", *FAST, *store, "--warmup", "0", "1", "--steps", "2"),
        *("--precision", "float32", "bfloat16"),
        cwd=tmp_path,
    )
    assert "forward (ms)" in result.stdout
    assert "bfloat16" in result.stdout
    assert "n/a" in result.stdout  # MFU: a CPU's peak is not documented.

    markdown = paceline("report", "table", *store, "--format", "markdown", cwd=tmp_path).stdout
    assert markdown.count("\n| ") == 2 + 4  # Notes on outlier samples follow.
    csv = paceline("report", "table", *store, "--format", "csv", cwd=tmp_path).stdout
    assert len(csv.splitlines()) == 1 + 4
    lines = paceline("report", "table", *store, "--json", cwd=tmp_path).stdout.splitlines()
    assert len([decode_record(line.encode()) for line in lines]) == 4
    assert "precision" in paceline("report", "table", *store, cwd=tmp_path).stdout

    drawn = paceline("report", "plot", *store, "--out", "figures", "--json", cwd=tmp_path).stdout
    paths = [json.loads(line)["path"] for line in drawn.splitlines()]
    assert len(paths) == 6
    assert all((tmp_path / path).stat().st_size > 1000 for path in paths)
    chosen = paceline(
        *("report", "plot", *store, "--out", "one", "--plot", "warmup"), cwd=tmp_path
    ).stdout
    assert chosen.splitlines() == ["one/warmup.png", "one/warmup.svg"]


@pytest.mark.slow
def test_bench_step_variants(tmp_path: pathlib.Path) -> None:
    result = paceline(
        *("bench", "step", *FAST, "--warmup", "1", "--steps", "1", "--json"),
        *("--phase", "forward", "forward-backward", "--precision", "float16"),
        *("--attention", "naive", "--activation-checkpointing", "full", "--tied-embeddings"),
        cwd=tmp_path,
    )
    records = [decode_record(line.encode()) for line in result.stdout.splitlines()]
    assert [record.case["phase"] for record in records] == ["forward", "forward-backward"]
    assert all(record.outcome == "ok" for record in records)


@pytest.mark.host("compilers need kernels")
@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--compile", "--compile-blocks"])
def test_bench_step_compiled(tmp_path: pathlib.Path, flag: str) -> None:
    result = paceline(
        *("bench", "step", *FAST, "--warmup", "1", "--steps", "2", "--json", flag), cwd=tmp_path
    )
    record = decode_record(result.stdout.encode())
    assert record.outcome == "ok"
    assert record.case["compile"] == {"--compile": "whole", "--compile-blocks": "blocks"}[flag]


@pytest.mark.slow
def test_what_cannot_fit_is_skipped_and_what_does_not_fit_is_recorded(
    tmp_path: pathlib.Path,
) -> None:
    result = paceline(
        *("bench", "step", "--model", "10B", "--memory-limit-gib", "16", "--json"), cwd=tmp_path
    )
    record = decode_record(result.stdout.encode())
    assert record.outcome == "skipped"
    assert record.reason == "needs at least 191.22 GiB, but only 16.00 GiB may be used"

    result = paceline(
        *("bench", "attention", "--head-dim", "16", "--context", "4096", "--batch", "4"),
        *("--steps", "1", "--warmup", "0", "--memory-limit-gib", "1", "--device", "cpu", "--json"),
        cwd=tmp_path,
    )
    record = decode_record(result.stdout.encode())
    assert record.outcome == "out_of_memory"
    assert "allocate" in str(record.reason)


@pytest.mark.parametrize(
    "flags",
    [["--causal"], *(pytest.param(flags, marks=pytest.mark.slow) for flags in ([], ["--compile"]))],
)
def test_bench_attention(tmp_path: pathlib.Path, flags: list[str]) -> None:
    result = paceline(
        *("bench", "attention", "--head-dim", "16", "--context", "128", "--batch", "2"),
        *("--steps", "2", "--warmup", "1", "--device", devices.of_commands(), "--json", *flags),
        cwd=tmp_path,
    )
    record = decode_record(result.stdout.encode())
    assert record.outcome == "ok"
    assert record.metrics["saved_for_backward_bytes"].value > 0


@pytest.mark.slow
def test_env_with_self_test(tmp_path: pathlib.Path) -> None:
    result = paceline("env", "--self-test", "--json", cwd=tmp_path)
    record = decode_record(result.stdout.encode())
    assert record.case["world_size"] == 2
    assert record.case["backend"] == devices.backend()
    assert record.metrics["all_reduce_time_s"].value > 0
    assert "gloo" in record.environment.backends
    table = paceline("env", cwd=tmp_path).stdout
    assert all(word in table for word in ("torch", "processor", "backends", "links", "attention"))


@pytest.mark.slow
def test_a_case_that_takes_too_long_is_recorded_and_fails_the_command(
    tmp_path: pathlib.Path,
) -> None:
    code = (
        "import sys\n"
        "from paceline.benchmarks.harness import isolation\n"
        "from paceline.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    isolation._GRACE_S = 0.5  # less than it takes to import torch\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "impatient.py").write_text(code)
    result = subprocess.run(
        [sys.executable, "impatient.py", "bench", "step", *FAST, "--time-limit-s", "0.1", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    record = decode_record(result.stdout.encode())
    assert (record.outcome, record.reason) == ("timeout", "timed out after 1 s")
