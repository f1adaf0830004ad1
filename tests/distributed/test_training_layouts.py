"""A run gives the same results under any layout, and can resume under another."""

import dataclasses
import functools
import itertools
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import UsageError
from paceline.parallel import RankError, RankPool
from paceline.training.config import RunConfig
from paceline.training.forecast import layout_of
from paceline.training.metrics import EvaluationRow, MetricsFile, StepRow
from tests.distributed.small_runs import changed, small_run, train_rank

Pools = Callable[[int], RankPool]
Layout = Mapping[str, Any]
STEPS = 4

TENSOR: Layout = {"tensor": 2, "sequence_parallel": True}
CONTEXT: Layout = {"context": 2, "strategy": "fsdp"}
PIPELINE: Layout = {"pipeline": 2}
WIDE: dict[str, Layout] = {
    "tensor, shards": {"tensor": 2, "sequence_parallel": True, "strategy": "fsdp"},
    "tensor, replicas": {"tensor": 2},
    "context, tensor": {"context": 2, "tensor": 2},
    "context, ZeRO-2": {"context": 2, "strategy": "zero2"},
    "replicas of shards": {"replicate": 2, "strategy": "fsdp"},
    "pipeline, tensor": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
    "pipeline, shards": {"pipeline": 2, "strategy": "fsdp"},
    "pipeline, replicas": {"pipeline": 2},
    "pipeline, context": {"pipeline": 2, "context": 2},
    "interleaved, tensor": {"pipeline": 2, "interleave": 2, "tensor": 2},
}
"""Layouts for four ranks."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    run = small_run(tmp_path_factory.mktemp("layouts"))
    return changed(
        run,
        "run",
        model={"num_layers": 4, "tied_embeddings": True},
        training={"steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "clip_norm": 0.5},
        checkpoint={"every_steps": 2, "keep_last": 9},
        evaluation={"sequences": 6, "every_steps": 2, "sample_prompt": "To be", "sample_tokens": 5},
        optimizer={"learning_rate": 1e-2, "epsilon": 1e-4},
        watch={"hash_every_steps": 2},
    )


@pytest.fixture(scope="module")
def alone(config: RunConfig, rank_pool: Pools) -> RunConfig:
    """Returns the finished run of one process."""
    single = changed(config, "alone")
    rank_pool(1).run(train_rank, single)
    return single


def _numbers(config: RunConfig) -> tuple[list[list[float]], list[str | None]]:
    """Returns step losses, gradient norms and evaluation losses, and the generated samples."""
    rows = list(MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read())
    steps = [row for row in rows if isinstance(row, StepRow)]
    evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
    numbers = [
        [row.loss for row in steps],
        [row.gradient_norm for row in steps],
        [row.loss for row in evaluations],
    ]
    return numbers, [row.sample for row in evaluations]


def _require_same(config: RunConfig, expected: RunConfig) -> None:
    numbers, samples = _numbers(config)
    expected_numbers, expected_samples = _numbers(expected)
    assert len(numbers[0]) == STEPS
    for own, theirs in zip(numbers, expected_numbers, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-5)
    assert samples == expected_samples
    assert len(samples) == 2


def _digests(config: RunConfig) -> list[str]:
    rows = MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read()
    return [row.data_digest for row in rows if isinstance(row, StepRow)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [TENSOR, CONTEXT, PIPELINE], ids=["tensor", "context", "stages"])
def test_a_layout_trains_like_one_process(
    config: RunConfig, rank_pool: Pools, alone: RunConfig, layout: Layout
) -> None:
    run = changed(config, "-".join(layout), parallel=dict(layout))
    rank_pool(2).run(train_rank, run)
    _require_same(run, alone)
    assert _digests(run) == _digests(alone)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(WIDE))
def test_every_layout_trains_like_one_process(
    config: RunConfig, rank_pool: Pools, alone: RunConfig, layout: str
) -> None:
    run = changed(config, layout, parallel=dict(WIDE[layout]))
    rank_pool(4).run(train_rank, run)
    _require_same(run, alone)
    assert _digests(run) == _digests(alone)


SAVED: dict[str, tuple[Layout, int]] = {
    "one-rank": ({}, 1),
    "tensor": (TENSOR, 2),
    "stages": (PIPELINE, 2),
    "context": (CONTEXT, 2),
    "fsdp": ({"strategy": "fsdp"}, 2),
    "stages-tensor": (WIDE["interleaved, tensor"], 4),
    "tensor-shards": (WIDE["tensor, shards"], 4),
}
"""Layouts and their numbers of ranks."""
PAIRS = [
    pytest.param(*pair, marks=() if pair == ("stages", "tensor") else pytest.mark.slow)
    for pair in itertools.product(SAVED, repeat=2)
    if "tensor-shards" not in pair or set(pair) <= {"tensor-shards", "fsdp", "context"}
]


def _train_half(config: RunConfig, pools: Pools, first: str) -> pathlib.Path:
    """Trains the first half of a run's steps under a layout; returns the run's directory."""
    layout, num_ranks = SAVED[first]
    run = changed(config, first, parallel=dict(layout), training={"steps": STEPS // 2})
    pools(num_ranks).run(train_rank, run)
    return pathlib.Path(run.out)


@pytest.fixture(scope="module")
def saved(config: RunConfig, rank_pool: Pools) -> Callable[[str], pathlib.Path]:
    """Returns a cached function from a layout to the directory of its half-finished run."""
    return functools.cache(functools.partial(_train_half, config, rank_pool))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_goes_on_under_any_other_layout(
    config: RunConfig,
    rank_pool: Pools,
    alone: RunConfig,
    saved: Callable[[str], pathlib.Path],
    first: str,
    second: str,
) -> None:
    run = _go_on(config, rank_pool, saved(first), second)
    _require_same(run, alone)


def _go_on(config: RunConfig, pools: Pools, half: pathlib.Path, second: str) -> RunConfig:
    """Trains the second half on a copy of a run under another layout; returns its config."""
    layout, num_ranks = SAVED[second]
    run = changed(config, f"{half.name}-then-{second}", parallel=dict(layout))
    shutil.copytree(half, run.out)
    pools(num_ranks).run(train_rank, run)
    return run


@pytest.fixture(scope="module")
def odd(config: RunConfig, rank_pool: Pools) -> tuple[RunConfig, RunConfig]:
    """Returns a run with untied embeddings and an uneven vocabulary, and that of one process."""
    model = {"vocab_size": 259, "tied_embeddings": False}
    place = {"out": str(pathlib.Path(config.out).parent / "odd" / "run")}
    run = dataclasses.replace(changed(config, "odd", model=model), **place)
    single = changed(run, "alone")
    rank_pool(1).run(train_rank, single)
    return run, single


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("one-rank", "tensor-shards"),
        ("tensor-shards", "one-rank"),
        ("tensor-shards", "stages"),
        ("stages-tensor", "tensor-shards"),
    ],
)
def test_an_odd_vocabulary_goes_on_under_another_layout(
    odd: tuple[RunConfig, RunConfig], rank_pool: Pools, first: str, second: str
) -> None:
    run, single = odd
    run = dataclasses.replace(run, out=str(pathlib.Path(run.out).parent / f"to-{second}" / "run"))
    half = _train_half(run, rank_pool, first)
    _require_same(_go_on(run, rank_pool, half, second), single)


def test_what_cannot_run_is_refused_with_the_reason(config: RunConfig) -> None:
    refused = {
        "tensor 4 does not divide 2 key-value heads": ({"tensor": 4}, 4),
        "need 4 ranks, but 6 is not a multiple": ({"tensor": 2, "pipeline": 2}, 6),
        "pipeline 4 needs at least as many micro-batches, and a step has 2": (
            {"pipeline": 4, "strategy": "fsdp"},
            8,
        ),
        "ZeRO-1 runs only with data parallelism alone": ({"tensor": 2, "strategy": "zero1"}, 4),
        "interleave without a pipeline": ({"interleave": 2}, 2),
        "replicate 2 leaves no ranks to shard parameters over": (
            {"replicate": 2, "strategy": "fsdp"},
            2,
        ),
        "8 stages .pipeline 4 with interleave 2. need a block each, and the model has 4 layers": (
            {"pipeline": 4, "interleave": 2},
            4,
        ),
        "context 8 needs a context length divisible by 16, not 24": ({"context": 8}, 8),
    }
    for reason, (layout, num_ranks) in refused.items():
        length = 24 if "24" in reason else 16
        run = changed(config, "refused", parallel=dict(layout), data={"context_length": length})
        with pytest.raises(UsageError, match=reason):
            layout_of(run, num_ranks)


def test_a_prompt_that_leaves_no_room_is_refused(config: RunConfig, rank_pool: Pools) -> None:
    run = changed(
        config,
        "no-room",
        parallel=dict(CONTEXT),
        model={"max_context_length": 18},
        evaluation={"sample_prompt": "x" * 16},
    )
    with pytest.raises(RankError, match=r"is 18, of which the layout's ranks can split 16; short"):
        rank_pool(2).run(train_rank, run)


def test_compiled_blocks_are_refused_on_tensor_ranks(config: RunConfig) -> None:
    run = changed(config, "refused", parallel=dict(TENSOR), model={"compile_blocks": True})
    with pytest.raises(UsageError, match=r"tensor 2 cannot run with model.compile_blocks"):
        layout_of(run, 2)
