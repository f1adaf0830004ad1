"""Generating a sample after an evaluation does not change training."""

import pathlib
from collections.abc import Callable

import pytest

from paceline.parallel import RankPool
from paceline.training.metrics import EvaluationRow, MetricsFile
from tests.distributed.small_runs import changed, losses_of, small_run, train_rank

Pools = Callable[[int], RankPool]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "torch_ddp", "torch_fsdp2"])
def test_samples_leave_training_as_it_is(
    tmp_path: pathlib.Path, rank_pool: Pools, strategy: str
) -> None:
    config = changed(
        small_run(tmp_path),
        "without",
        parallel={"strategy": strategy},
        evaluation={"sequences": 4, "every_steps": 1},
    )
    rank_pool(2).run(train_rank, config)
    asked = {"sample_prompt": "So it", "sample_tokens": 12}
    sampled = changed(config, "with", evaluation=asked)
    rank_pool(2).run(train_rank, sampled)
    assert losses_of(sampled) == losses_of(config)
    alone = changed(sampled, "alone")
    rank_pool(1).run(train_rank, alone)
    samples = [
        [row.sample for row in MetricsFile(run / "metrics.jsonl").read() if _is_evaluation(row)]
        for run in (tmp_path / "with", tmp_path / "alone")
    ]
    assert samples[0] == samples[1]
    assert len(samples[0]) == 3
    assert all(samples[0])


def _is_evaluation(row: object) -> bool:
    return isinstance(row, EvaluationRow)
