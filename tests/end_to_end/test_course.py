"""Tests of the literal command lines of the courses."""

import pathlib
import re
import subprocess
import sys

import pytest

COURSE = pathlib.Path(__file__).parents[2] / "course"
SMALL = ("--size", "bytes-34M", "--batch-size", "1", "--context-length", "16")
FEW = ("--warmup", "1", "--steps", "2")


def _run(script: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, COURSE / script, *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_naive_equals_the_baseline() -> None:
    lines = _run("benchmark_naive_ddp.py", "--model", "toy").splitlines()
    assert lines == ["Naive DDP matches baseline!"]


@pytest.mark.parametrize(
    ("script", "arguments", "num_messages"),
    [
        pytest.param(
            *("benchmark_naive_ddp.py", ("--model", "transformer"), 75), marks=pytest.mark.slow
        ),
        pytest.param(
            *("benchmark_optimized_ddp.py", ("--mode", "flat"), 1), marks=pytest.mark.slow
        ),
        pytest.param(
            *("benchmark_optimized_ddp.py", ("--mode", "individual"), 75), marks=pytest.mark.slow
        ),
        pytest.param(
            *("benchmark_optimized_ddp.py", ("--mode", "bucketed", "--bucket-size-mb", "10"), None),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("benchmark_optimized_ddp.py", ("--mode", "bucketed", "--bucket-mb", "1000"), 11),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_benchmarks_print_iteration_and_communication_time(
    script: str, arguments: tuple[str, ...], num_messages: int | None
) -> None:
    output = _run(script, *arguments, *SMALL, *FEW)
    assert re.search(r"^model: bytes-34M, 33,825,280 parameters, 2 ranks on cpu", output, re.M)
    assert re.search(r"^iteration time: [\d.]+ ms$", output, re.M)
    assert re.search(r"^communication time after backward: [\d.]+ ms$", output, re.M)
    alone = re.search(
        r"^communication time alone: [\d.]+ ms for 135 MB in (\d+) messages; the all-reduce "
        r"benchmark predicts [\d.]+ ms$",
        output,
        re.M,
    )
    assert alone is not None, output
    assert num_messages is None or int(alone[1]) == num_messages


@pytest.mark.slow
def test_sharding_prints_memory_at_three_instants_with_and_without() -> None:
    output = _run("sharding_optimizer.py", *SMALL, *FEW)
    assert re.search(r"^model: bytes-34M, 33,825,280 parameters, 2 ranks on cpu", output, re.M)
    assert re.findall(r"^(.*):$", output, re.M) == ["without sharding", "with sharding"]
    peaks = re.findall(
        r"^  peak memory (after init|before the optimizer step|after the optimizer step): "
        r"([\d.]+) MiB .*optimizer state ([\d.]+) (?:MiB|B)\)$",
        output,
        re.M,
    )
    assert len(peaks) == 6, output
    (_, _, none_yet), (_, before, whole), _, _, (_, before_sharded, half), _ = peaks
    assert float(none_yet) == 0
    # Two float32 moments, of all parameters and of half of them.
    assert float(whole) == pytest.approx(8 * 33_825_280 / 2**20, abs=0.01)
    assert float(half) == pytest.approx(4 * 33_825_280 / 2**20, abs=0.01)
    saved = float(before) - float(before_sharded)
    assert saved == pytest.approx(float(whole) - float(half), abs=0.02)
    assert len(re.findall(r"^  iteration time: [\d.]+ ms", output, re.M)) == 2
