import dataclasses

import pytest

from paceline.core.errors import UsageError
from paceline.core.units import GIB
from paceline.data.loader.config import SourceConfig
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    StepConfig,
)
from paceline.training.forecast import forecast, require_fit


def _config(micro_batch_size: int) -> RunConfig:
    return RunConfig(
        out="run",
        model=ModelConfig(preset="bytes-34M"),
        data=DataConfig(sources=(SourceConfig(place="tokens"),)),
        training=StepConfig(batch_size=64, micro_batch_size=micro_batch_size),
    )


def test_what_does_not_fit_is_refused_with_what_to_change() -> None:
    predicted = forecast(_config(32), world_size=2)
    with pytest.raises(UsageError, match=r"of which activations .* lower training.micro_batch"):
        require_fit(predicted, GIB)
    require_fit(predicted, 100 * GIB)
    require_fit(predicted, None)


def test_smaller_micro_batches_need_less() -> None:
    large, small = (forecast(_config(size), world_size=2).memory for size in (32, 1))
    assert small.activations < large.activations
    assert small.parameters == large.parameters


def test_what_is_kept_in_memory_is_said() -> None:
    config = _config(1)
    assert forecast(config, world_size=2).kept_in_memory_bytes == 0
    checkpoint = CheckpointConfig(memory_every_steps=5)
    kept = dataclasses.replace(config, checkpoint=checkpoint)
    predicted = forecast(kept, world_size=2)
    part = 12 * predicted.num_parameters / 2  # float32 weights and both moments, over two ranks.
    # Its own shard and another rank's replica, both twice during a save, and the staging copy.
    assert predicted.kept_in_memory_bytes == pytest.approx(5 * part, rel=1e-3)
    assert forecast(kept, world_size=1).kept_in_memory_bytes == pytest.approx(6 * part, rel=1e-3)
