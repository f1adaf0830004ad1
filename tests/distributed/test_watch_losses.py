"""All ranks skip a batch with a bad loss or gradient, or the run rolls back before it."""

import pathlib
from collections.abc import Callable

import pytest
import torch

from paceline.checkpoint.catalog import list_checkpoints
from paceline.parallel import RankPool
from paceline.training.config import RunConfig
from paceline.training.run_directory import audit_run
from paceline.training.toml_config import encode_config
from tests.distributed.faulty_runs import Poison, events_of, saved_tensors, train_faulty
from tests.distributed.small_runs import changed, losses_of, small_run

Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    place = tmp_path_factory.mktemp("poisoned")
    return changed(
        small_run(place),
        "run",
        training={"steps": 8},
        checkpoint={"every_steps": 4, "keep_last": 9},
    )


def _run(pool: RankPool, config: RunConfig, **what: tuple[object, ...]) -> str:
    """Trains and returns the outcome, which must be identical on all ranks."""
    poisons, left_out = what.get("poisons", ()), what.get("left_out", ())
    said = {str(outcome) for outcome in pool.run(train_faulty, config, (), poisons, left_out)}
    assert len(said) == 1
    (pathlib.Path(config.out) / "config.toml").write_text(encode_config(config))
    return said.pop()


def _require_equal(one: RunConfig, other: RunConfig, step: int) -> None:
    assert losses_of(one) == losses_of(other)
    expected = saved_tensors(other, step)
    assert expected
    for name, values in saved_tensors(one, step).items():
        assert torch.equal(values, expected.pop(name))
    assert not expected


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_skipped_batch_leaves_no_trace(
    config: RunConfig, rank_pool: Pools, strategy: str
) -> None:
    parallel = {"strategy": strategy}
    without = changed(config, f"without-{strategy}", parallel=parallel)
    _run(rank_pool(2), without, left_out=(3,))
    skipping = changed(
        config, f"skipping-{strategy}", parallel=parallel, watch={"on_nonfinite": "skip"}
    )
    _run(rank_pool(2), skipping, poisons=(Poison(rank=1, passes=(3,)),))
    _require_equal(skipping, without, 8)
    (event,) = events_of(skipping, "skipped")
    assert (event.step, event.details) == (3, {"first_sample": 8, "num_samples": 4})
    assert audit_run(pathlib.Path(skipping.out)) == (8, [])


def test_rolled_back_a_run_leaves_out_what_led_to_the_failure(
    config: RunConfig, rank_pool: Pools
) -> None:
    without = changed(config, "without-window")
    _run(rank_pool(2), without, left_out=(5, 6, 7))
    back = changed(config, "back", watch={"on_nonfinite": "rollback"})
    _run(rank_pool(2), back, poisons=(Poison(rank=0, passes=(7,)),))
    _require_equal(back, without, 8)
    (event,) = events_of(back, "skipped")
    assert event.details == {"first_sample": 16, "num_samples": 12}
    assert audit_run(pathlib.Path(back.out)) == (8, [])


def test_a_spike_is_skipped(config: RunConfig, rank_pool: Pools) -> None:
    spiked = Poison(rank=1, passes=(23,), kind="spike")
    reported = changed(config, "reported", training={"steps": 24})
    _run(rank_pool(2), reported, poisons=(spiked,))
    (event,) = events_of(reported, "spike")
    assert event.step == 23
    skipping = changed(config, "spike", training={"steps": 24}, watch={"on_spike": "skip"})
    _run(rank_pool(2), skipping, poisons=(spiked,))
    without = changed(config, "no-spike", training={"steps": 24})
    _run(rank_pool(2), without, left_out=(23,))
    _require_equal(skipping, without, 24)


@pytest.mark.parametrize("answer", ["skip", "rollback"])
def test_failures_that_do_not_end_stop_the_run(
    config: RunConfig, rank_pool: Pools, answer: str
) -> None:
    hopeless = changed(config, f"hopeless-{answer}", watch={"on_nonfinite": answer})
    always = Poison(rank=1, passes=tuple(range(6, 99)))
    said = _run(rank_pool(2), hopeless, poisons=(always,))
    assert said.startswith(f"step {6 if answer == 'skip' else 5}: the loss is")
    assert len(events_of(hopeless, "skipped")) == (3 if answer == "skip" else 1)
    saved = list_checkpoints(pathlib.Path(hopeless.out) / "checkpoints")
    assert [each.step for each in saved] == [4]
