"""Tests of where a run goes on after a rejected step or a corrupted state."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.data.loader.config import SourceConfig
from paceline.data.loader.torch_batches import TorchBatch
from paceline.health.config import HealthConfig
from paceline.health.errors import CorruptionError, DivergedError
from paceline.training import recovery
from paceline.training.config import CheckpointConfig, DataConfig, RunConfig, StepConfig
from paceline.training.metrics import CORRUPTED, SKIPPED, STARTED, EventRow, MetricsRow
from paceline.training.observers import Observer
from paceline.training.recovery import Recovery, explain_nonfinite
from paceline.training.step import StepResult

BATCH_SIZE, SAVED = 8, 30
RESULT = StepResult(loss=99.0, gradient_norm=1.0, stop=False, digest=0)


class _Position:
    """The position of a run in its data."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples = state["consumed_samples"]


class _Log(Observer):
    def __init__(self) -> None:
        self.rows: list[EventRow] = []

    def log(self, row: MetricsRow) -> None:
        assert isinstance(row, EventRow)
        self.rows.append(row)


class _Run:
    """A run at a step; a checkpoint may be at step `SAVED`."""

    def __init__(self, *, has_checkpoint: bool = True, **watch: Any) -> None:
        self.position = _Position(41 * BATCH_SIZE)
        self.log = _Log()
        self.checksums = 0
        self.saved_diverged: list[int] = []
        self.monitor = SimpleNamespace(
            skip_reason="spike",
            spike_limit=9.0,
            num_applied=40,
            explain_corruption=lambda: "rank 1 differs",
            find_damage=lambda step, at_once: None,
            update_checksum=self._update_checksum,
        )

        def roll_back(_: object, position: _Position) -> int | None:
            if not has_checkpoint:
                return None
            position.samples = SAVED * BATCH_SIZE
            return SAVED

        def save_diverged(step: int, *_: object) -> str:
            self.saved_diverged.append(step)
            return "run/diverged"

        config = RunConfig(
            out="run",
            data=DataConfig(sources=(SourceConfig(place="tokens"),)),
            training=StepConfig(batch_size=BATCH_SIZE),
            checkpoint=CheckpointConfig(every_steps=10),
            watch=HealthConfig(**watch),
        )
        self.recovery = Recovery(
            config,
            cast(Any, SimpleNamespace(roll_back=roll_back, save_diverged=save_diverged)),
            cast(Any, SimpleNamespace(module=None)),
            self.position,
            self.log,
            cast(Any, self.monitor),
        )

    def _update_checksum(self) -> None:
        self.checksums += 1

    def skip(self, step: int) -> int:
        """Rejects the step after `step`, whose batch was just read."""
        self.position.samples = (step + 1) * BATCH_SIZE
        tokens = torch.zeros(BATCH_SIZE, 4, dtype=torch.int64)
        batch = SimpleNamespace(first_sample=step * BATCH_SIZE, tokens=tokens)
        return self.recovery.after_skip(step, RESULT, cast(TorchBatch, batch), cast(Any, None))

    def events(self, name: str) -> list[EventRow]:
        return [row for row in self.log.rows if row.name == name]


def test_a_rollback_leaves_out_the_samples_since_the_checkpoint() -> None:
    """One of them may be the cause of the spike."""
    run = _Run(on_spike="rollback")
    assert run.skip(40) == SAVED
    assert run.position.samples == 41 * BATCH_SIZE
    (skipped,) = run.events(SKIPPED)
    assert skipped.step == SAVED + 1
    assert skipped.details == {"first_sample": SAVED * BATCH_SIZE, "num_samples": 11 * BATCH_SIZE}
    (started,) = run.events(STARTED)
    assert started.step == SAVED
    assert run.checksums == 1, "the checksum is that of the state before the rollback"


def test_after_corruption_the_same_samples_are_trained_on_again() -> None:
    run = _Run(on_corruption="rollback")
    run.monitor.skip_reason = "corrupted"
    assert run.skip(40) == SAVED
    assert run.position.samples == SAVED * BATCH_SIZE
    assert not run.events(SKIPPED)
    (corrupted,) = run.events(CORRUPTED)
    assert (corrupted.step, corrupted.message) == (SAVED, "found at step 40: rank 1 differs")
    assert run.checksums == 1


def test_damage_that_is_found_now_counts_more_than_the_spike() -> None:
    run = _Run(on_spike="skip", on_corruption="stop")
    asked: list[tuple[int, bool]] = []

    def find_damage(step: int, at_once: bool) -> str:
        asked.append((step, at_once))
        return "rank 0 was changed"

    run.monitor.find_damage = find_damage
    with pytest.raises(CorruptionError, match="found at step 40: rank 0 was changed; nothing was"):
        run.skip(40)
    assert asked == [(40, True)]
    assert [row.step for row in run.events(CORRUPTED)] == [40]


def test_a_skipped_batch_is_left_out_and_counted() -> None:
    run = _Run(on_spike="skip", most_in_a_row=2)
    assert run.skip(40) == 40
    (skipped,) = run.events(SKIPPED)
    assert skipped.step == 41
    assert skipped.details == {"first_sample": 40 * BATCH_SIZE, "num_samples": BATCH_SIZE}
    assert skipped.message.startswith("samples 320 to 327, step 41: the loss is 99, above the")
    assert run.skip(40) == 40
    with pytest.raises(DivergedError, match="3 in a row; no rank has applied the update"):
        run.skip(40)
    assert run.saved_diverged == [40]


def test_a_step_that_is_applied_in_between_ends_the_row() -> None:
    run = _Run(on_spike="skip", most_in_a_row=1)
    for _ in range(5):
        run.skip(40)
        run.monitor.num_applied += 1


def test_rollbacks_to_one_checkpoint_are_counted() -> None:
    run = _Run(on_spike="rollback", most_in_a_row=2)
    assert run.skip(35) == SAVED
    assert run.skip(39) == SAVED
    with pytest.raises(DivergedError, match="3 in a row"):
        run.skip(39)
    # Beyond the next checkpoint it is another place.
    run = _Run(on_spike="rollback", most_in_a_row=1)
    assert run.skip(35) == SAVED
    assert run.skip(SAVED + 10) == SAVED


def test_without_a_checkpoint_the_run_ends_and_keeps_its_state() -> None:
    run = _Run(on_spike="rollback", on_corruption="rollback", has_checkpoint=False)
    kept = "there is no checkpoint to roll back to; .* and run/diverged has the state before the"
    with pytest.raises(DivergedError, match=kept):
        run.skip(3)
    assert run.saved_diverged == [3]
    assert run.position.samples == 4 * BATCH_SIZE
    assert run.checksums == 0
    run.monitor.skip_reason = "corrupted"
    with pytest.raises(CorruptionError):
        run.skip(3)
    assert [row.step for row in run.events(CORRUPTED)] == [3]


def test_a_batch_that_is_not_finite_is_skipped_with_its_norm() -> None:
    run = _Run(on_nonfinite="skip")
    run.monitor.skip_reason = "nonfinite"
    assert run.skip(40) == 40
    (skipped,) = run.events(SKIPPED)
    assert skipped.message == "samples 320 to 327, step 41: the loss is 99, the gradient norm 1"


def test_a_run_that_may_not_skip_says_so() -> None:
    with pytest.raises(DivergedError, match="above the spike limit 9: no batch may be skipped; no"):
        _Run(on_spike="stop").skip(40)


def test_a_batch_that_ends_the_run_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def explain(_module: object, _compute: object, what: str) -> str:
        asked.append(what)
        return "rank 2 is wrong"

    monkeypatch.setattr(recovery, "explain_nonfinite", explain)
    run = _Run(on_nonfinite="stop")
    run.monitor.skip_reason = "nonfinite"
    with pytest.raises(DivergedError, match="the gradient norm 1: rank 2 is wrong; no rank has"):
        run.skip(40)
    assert asked == ["samples 320 to 327"]


@pytest.mark.parametrize(("num_wrong", "more"), [(4, ""), (5, "; and 1 more ranks")])
def test_four_ranks_are_named(num_wrong: int, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(reports: list[str | None], own: str) -> None:
        reports[:] = [own if rank < num_wrong else None for rank in range(len(reports))]

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        module.get_parameter("0.weight").fill_(torch.nan)
    found = explain_nonfinite(module, lambda: module(torch.ones(1, 2)), "samples 0 to 3")
    own = "rank 0 (samples 0 to 3): the output of 0 is the first that is not finite"
    assert found == "; ".join([own] * 4) + more
    # Nothing watches the passes that follow.
    assert not any(each._forward_hooks for each in module.modules())
