"""The literal command lines of the courses."""

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
        ("benchmark_naive_ddp.py", ("--model", "transformer"), 75),
        ("benchmark_optimized_ddp.py", ("--mode", "flat"), 1),
        ("benchmark_optimized_ddp.py", ("--mode", "individual"), 75),
        ("benchmark_optimized_ddp.py", ("--mode", "bucketed", "--bucket-size-mb", "10"), None),
        ("benchmark_optimized_ddp.py", ("--mode", "bucketed", "--bucket-mb", "1000"), 11),
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
