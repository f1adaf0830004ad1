"""Torch faults that Paceline works around; the test fails once a torch release fixes one."""

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.host("faults of torch on a CPU")

ROOT = pathlib.Path(__file__).parents[2]

FAULTS = {
    "context_parallel_attention": "does not have a sharding strategy registered",
    "zero_bubble_with_fsdp2": "parameters have no gradient",
    "loss_parallel_after_an_error": "requires exactly one mesh dim to shard",
    "compiled_block_behind_a_split_embedding": "'Tensor' object has no attribute '_local_tensor'",
}


@pytest.mark.slow
def test_torch_has_its_faults_still() -> None:
    program = [sys.executable, "-m", "studies.parallel.torch_faults"]
    done = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found.keys() == FAULTS.keys()
    for fault, message in FAULTS.items():
        assert message in found[fault], fault
