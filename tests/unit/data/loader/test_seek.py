"""Tests that a dataset of 10^13 tokens opens in milliseconds, in little memory, without torch."""

import json
import pathlib
import subprocess
import sys

import data_seek
import numpy as np
import pytest

from paceline.data.sampling.stream import SampleStream


@pytest.mark.parametrize("context", data_seek.CONTEXTS)
def test_a_sample_of_very_many_is_read_at_once(tmp_path: pathlib.Path, context: int) -> None:
    # The manifest lists 10^5 shards; only the files that are needed exist.
    num_samples = (data_seek.NUM_SHARDS * data_seek.SHARD_TOKENS - 1) // context
    first = data_seek.FIRST_SAMPLE
    stream = SampleStream([num_samples], weights=[1], seed=0)
    _, samples = stream.locate(np.arange(first, first + data_seek.BATCH))
    data_seek.write_sparse_dataset(
        tmp_path / "dataset", (samples * context // data_seek.SHARD_TOKENS).tolist()
    )
    command = [sys.executable, data_seek.__file__, "unused"]
    command += ["--seek", str(tmp_path / "dataset"), str(context)]
    rounds = [
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for _ in range(3)
    ]
    # 42 ms on an idle machine. Other load disturbs only one of the two clocks. Reading something
    # of every shard would take seconds.
    assert min(min(each["cpu_time_s"], each["total_time_s"]) for each in rounds) < 1
    assert max(each["resident_peak_bytes"] for each in rounds) < 100e6
