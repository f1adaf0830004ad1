import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import get_args

import pytest

from paceline.core.errors import UsageError
from paceline.core.runnable import needs_mesh
from paceline.core.strategies import Compression, StrategyName
from paceline.core.units import GIB
from paceline.data.loader.config import SourceConfig
from paceline.predict.history import HistoryEntry, Quantity
from paceline.records import RecordStore
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OuterConfig,
    ParallelConfig,
    RunConfig,
    StepConfig,
)
from paceline.training.forecast import forecast, layout_of, require_fit
from tests.unit.predict.calibration_cases import make_record, make_records

_RANKS = (1, 2, 4, 8)
_TINY = ModelConfig(
    preset="bytes-6M", d_model=64, d_ff=128, num_layers=4, num_heads=4, num_kv_heads=4
)
_AXES = {
    "tensor": (1, 2),
    "sequence_parallel": (False, True),
    "context": (1, 2),
    "pipeline": (1, 2),
    "interleave": (1, 2),
    "replicate": (1, 2),
}


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


def test_accelerators_are_those_that_the_config_or_the_ranks_name() -> None:
    config = _config(1)
    on_cpu, on_accelerator = (
        forecast(config, world_size=2, on_accelerator=known) for known in (False, True)
    )
    assert on_accelerator.memory_bytes < on_cpu.memory_bytes
    assert forecast(config, world_size=2).memory == on_cpu.memory
    named = dataclasses.replace(config, parallel=ParallelConfig(device="cuda"))
    assert forecast(named, world_size=2).memory == on_accelerator.memory


def test_every_micro_batch_counts() -> None:
    def bytes_of(strategy: StrategyName, batch_size: int) -> int:
        config = dataclasses.replace(
            _config(1),
            parallel=ParallelConfig(strategy=strategy),
            training=StepConfig(batch_size=batch_size, micro_batch_size=1),
        )
        memory = forecast(config, world_size=2).memory
        return memory.total - memory.buffers

    # Gradients that are not averaged yet are whole on every rank, in their buckets or beside them.
    gradients = forecast(_config(1), world_size=2).memory.parameters
    assert bytes_of("ddp", 4) == bytes_of("ddp", 8)
    assert bytes_of("zero2", 4) - bytes_of("zero2", 2) > gradients / 2
    assert bytes_of("torch_fsdp2", 4) - bytes_of("torch_fsdp2", 2) > gradients / 4


@pytest.mark.parametrize(("compression", "bytes_per_parameter"), [("int4", 6), ("bf16", 0)])
def test_what_packed_messages_leave_out_needs_memory(
    compression: Compression, bytes_per_parameter: int
) -> None:
    config = _config(1)
    plain = forecast(config, world_size=2).memory
    parallel = ParallelConfig(compression=compression)
    packed = forecast(dataclasses.replace(config, parallel=parallel), world_size=2)
    assert packed.memory.buffers - plain.buffers == pytest.approx(
        bytes_per_parameter * packed.num_parameters, rel=1e-6
    )
    alone = forecast(dataclasses.replace(config, parallel=parallel), world_size=1)
    assert alone.memory == forecast(config, world_size=1).memory


def test_a_site_shards_by_itself_and_keeps_the_outer_loops_state() -> None:
    config = _config(1)
    parallel = ParallelConfig(strategy="fsdp")
    shared = dataclasses.replace(parallel, outer=OuterConfig(sites=2, learning_rate=0.7))
    inside = forecast(dataclasses.replace(config, parallel=parallel), world_size=2)
    twice = dataclasses.replace(config.training, batch_size=2 * config.training.batch_size)
    config = dataclasses.replace(config, parallel=shared, training=twice)
    sites = forecast(config, world_size=4)
    assert sites.memory.parameters == inside.memory.parameters
    # Common values, what is left out, and half of what is left out of averages; of half of each.
    kept = (4 + 4 + 4 / 2) * sites.num_parameters / 2
    assert sites.memory.buffers - inside.memory.buffers == pytest.approx(kept, rel=1e-6)


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


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A calibration of a fictitious machine for every number of ranks of these tests."""
    store = RecordStore(tmp_path_factory.mktemp("calibration") / "machine.jsonl")
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    sizes = {"smallest_bytes": 1, "largest_bytes": 10}
    for ranks in _RANKS:
        place = {"world_size": ranks}
        shapes = [
            make_record("linear", tokens=64, inputs=64, outputs=128, **place),
            make_record("attention", batch=2, context=128, **heads, attention="sdpa", **place),
        ]
        others = [
            record
            for record in make_records(**place)
            if record.case["quantity"] not in ("linear", "attention")
        ]
        owners = [
            make_record(quantity, operation=operation, **sizes, **place)
            for operation in ("reduce_to_owners", "gather_from_owners")
            for quantity in ("collective", "contention")
        ]
        for record in (*shapes, *others, *owners):
            store.append(record)
    return store.path


def _run(model: ModelConfig = _TINY, precision: str = "float32", **parallel: object) -> RunConfig:
    return RunConfig(
        out="run",
        model=model,
        data=DataConfig(sources=(SourceConfig(place="tokens"),), context_length=128),
        training=StepConfig(batch_size=32, micro_batch_size=2, precision=precision),
        parallel=ParallelConfig(**parallel),
    )


def _accepted(strategy: StrategyName, ranks: int) -> Iterator[RunConfig]:
    """Yields a run with every combination of the axes that the trainer accepts."""
    for sizes in itertools.product(*_AXES.values()):
        axes = dict(zip(_AXES, sizes, strict=True))
        config = _run(strategy=strategy, **axes)
        try:
            layout_of(config, ranks)
        except UsageError:
            continue
        yield config


def _earlier(quantity: Quantity, formula: float, measured: float) -> HistoryEntry:
    return HistoryEntry(
        quantity=quantity,
        run="earlier",
        parameters=1,
        world_size=2,
        threads=1,
        hardware="made up",
        formula=formula,
        predicted=None,
        measured=measured,
    )


@pytest.mark.parametrize("ranks", _RANKS)
@pytest.mark.parametrize("strategy", get_args(StrategyName))
def test_every_run_that_can_start_has_a_forecast(
    calibration: pathlib.Path, strategy: StrategyName, ranks: int
) -> None:
    accepted = list(_accepted(strategy, ranks))
    assert accepted or strategy == "torch_zero"
    for config in accepted:
        predicted = forecast(config, ranks, calibration)
        assert min(dataclasses.astuple(predicted.memory)) >= 0, config.parallel
        assert predicted.memory.activations > 0, config.parallel
        assert predicted.step_time_s is not None, config.parallel
        assert predicted.step_time_s > 0, config.parallel
        for quantity, formula in predicted.formulas.items():
            estimate = predicted.corrected[quantity]
            assert estimate.value == formula
        step = predicted.corrected["step_time_s"]
        assert step.low is not None
        assert step.high is not None
        assert step.low <= step.value <= step.high


def test_what_no_checkpoint_can_hold_is_refused_with_what_can_be_saved() -> None:
    config = _run(strategy="torch_zero")
    with pytest.raises(UsageError, match=r"torch_zero cannot be saved.*; use zero1") as refused:
        layout_of(config, 2)
    assert "\n" not in str(refused.value)


def test_a_single_rank_has_no_strategy_to_refuse(calibration: pathlib.Path) -> None:
    config = _run(strategy="torch_zero")
    assert forecast(config, 1, calibration) == forecast(_run(strategy="ddp"), 1, calibration)


def test_the_axes_make_meshes() -> None:
    layouts = [layout_of(config, 8) for config in _accepted("fsdp", 8)]
    assert sum(map(needs_mesh, layouts)) > 20
    for axis in ("tensor", "context", "pipeline", "pipeline_interleave", "replicate"):
        assert {getattr(layout, axis) for layout in layouts} == {1, 2}


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_precision_and_recomputation_count_on_a_mesh(
    calibration: pathlib.Path, axis: str, precision: str, checkpointing: str
) -> None:
    plain = forecast(_run(**{axis: 2}), 2, calibration)
    model = dataclasses.replace(_TINY, activation_checkpointing=checkpointing)
    predicted = forecast(_run(model, precision, **{axis: 2}), 2, calibration)
    if (precision, checkpointing) == ("float32", "none"):
        assert predicted == plain
        return
    assert predicted.memory.parameters == plain.memory.parameters
    assert 0 < predicted.memory.total < plain.memory.total
    if checkpointing == "full":
        assert predicted.step_time_s > plain.step_time_s


def test_earlier_runs_on_the_machine_give_intervals(calibration: pathlib.Path) -> None:
    config = _run(tensor=2)
    plain = forecast(config, 2, calibration)
    history = [
        _earlier(quantity, formula, factor * formula)
        for quantity, formula in plain.formulas.items()
        for factor in (1.1, 1.2, 1.3, 1.4, 1.5)
    ]
    predicted = forecast(config, 2, calibration, history=history)
    assert predicted.formulas == plain.formulas
    for quantity, formula in plain.formulas.items():
        estimate = predicted.corrected[quantity]
        assert estimate.value == pytest.approx(1.3 * formula)
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0 < estimate.low < estimate.value < estimate.high


def test_without_a_calibration_a_mesh_has_its_memory_only() -> None:
    predicted = forecast(_run(pipeline=2), 2)
    assert predicted.step_time_s is None
    assert predicted.memory.total > 0
    assert "step_time_s" not in predicted.corrected


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    predicted = forecast(_run(tensor=2), 2)
    with pytest.raises(UsageError, match="of which activations"):
        require_fit(predicted, predicted.memory.total - 1)
    require_fit(predicted, predicted.memory.total)
