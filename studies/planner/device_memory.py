r"""Compares forecasts of peak memory with the peaks of accelerators' allocators.

    PYTHONPATH=tests/emulated/plugin PACELINE_TEST_DEVICE=emulated \
        python -m studies.planner.device_memory results/device-memory.jsonl

Trains two steps of each case with the trainer, on the accelerators that PACELINE_TEST_DEVICE names:
`emulated`, or those of the machine, such as `cuda`. From the second step on, the optimizer's state
exists. Its peak is that of the fullest rank. Appends a `device_memory` record for each case.

With `--explain`, it prints for cases whose name contains the text what is alive at the peak.
"""

import contextlib
import dataclasses
import gc
import itertools
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

from paceline.core.specs import BatchShape
from paceline.core.strategies import StrategyName
from paceline.devices import accelerator
from paceline.devices.hardware import describe_hardware
from paceline.parallel import RankPool
from paceline.records.schema import model_case_fields
from paceline.training import loop
from paceline.training.config import (
    CheckpointConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    StepConfig,
)
from paceline.training.forecast import forecast, layout_of
from paceline.training.run import run
from studies.harness.records import append_record
from studies.harness.runs import sample_run
from studies.harness.study import study_parser
from studies.planner.live_tensors import LiveTensors
from tests import devices

_STRATEGIES: tuple[StrategyName, ...] = (
    *("naive", "flat", "overlapped", "ddp", "zero1", "zero2", "fsdp"),
    *("torch_ddp", "torch_fsdp2"),
)
_ON_TWO: tuple[dict[str, Any], ...] = (
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"context": 2},
    {"context": 2, "strategy": "fsdp"},
    {"pipeline": 2},
    {"pipeline": 2, "interleave": 2},
)
_ON_FOUR: tuple[dict[str, Any], ...] = (
    {"replicate": 2, "strategy": "fsdp"},
    {"tensor": 2, "strategy": "fsdp"},
    {"context": 2, "strategy": "zero2"},
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 2, "strategy": "zero2"},
)
_MODEL = ModelConfig(
    vocab_size=512,
    num_layers=4,
    d_model=192,
    d_ff=512,
    num_heads=4,
    num_kv_heads=4,
    max_context_length=64,
)
_CONTEXT, _SEQUENCES = 64, 4
"""Length and number of a data-parallel rank's sequences in a step."""
_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run whose memory is forecast and measured."""

    parallel: ParallelConfig
    checkpointing: Literal["none", "full"]
    precision: Literal["float32", "bfloat16"]
    passes: int
    """Micro-batches of a step."""
    clips: bool
    world_size: int = 2

    @property
    def layout(self) -> str:
        """Axes of the mesh other than the data-parallel one; empty if there are none."""
        axes = ("tensor", "sequence_parallel", "context", "pipeline", "interleave", "replicate")
        sizes = {axis: int(getattr(self.parallel, axis)) for axis in axes}
        plain = ParallelConfig()
        return " ".join(f"{a} {n}" for a, n in sizes.items() if n != int(getattr(plain, a)))

    @property
    def name(self) -> str:
        """The case in words."""
        where = f"{self.parallel.strategy} {self.layout}".strip()
        how = f"{self.precision} checkpointing {self.checkpointing} passes {self.passes}"
        return f"{where}, {how} clips {self.clips}, {self.world_size} ranks"

    def config(self, base: RunConfig) -> RunConfig:
        """Returns the run, from what `base_run` has written."""
        model = dataclasses.replace(base.model, activation_checkpointing=self.checkpointing)
        changed = dataclasses.replace(base, model=model, parallel=self.parallel)
        data_ranks = layout_of(changed, self.world_size).data_parallel
        training = dataclasses.replace(
            base.training,
            batch_size=_SEQUENCES * data_ranks,
            micro_batch_size=_SEQUENCES // self.passes,
            precision=self.precision,
            clip_norm=1.0 if self.clips else 0.0,
        )
        return dataclasses.replace(changed, training=training)


def base_run(place: pathlib.Path) -> RunConfig:
    """Writes the sample text; returns the config of a run on it, which cases change."""
    return sample_run(
        place,
        "run",
        model=_MODEL,
        context=_CONTEXT,
        training=StepConfig(steps=_STEPS, batch_size=8 * _SEQUENCES),
        schedule=ScheduleConfig(name="constant", warmup_steps=0),
        checkpoint=CheckpointConfig(every_steps=_STEPS),
    )


def memory_cases() -> list[Case]:
    """Returns all cases: every strategy in eight ways, and meshes in four."""
    return [*_strategies(), *_meshes()]


def _strategies() -> Iterator[Case]:
    for strategy in _STRATEGIES:
        ways = itertools.product(("none", "full"), ("float32", "bfloat16"), (False, True))
        for number, (checkpointing, precision, accumulates) in enumerate(ways):
            yield Case(
                parallel=ParallelConfig(strategy=strategy),
                checkpointing=checkpointing,  # type: ignore[arg-type]
                precision=precision,  # type: ignore[arg-type]
                passes=(2 if precision == "float32" else 4) if accumulates else 1,
                clips=number in (0, 3, 5, 6),
            )


def _meshes() -> Iterator[Case]:
    worlds = [*((axes, 2) for axes in _ON_TWO), *((axes, 4) for axes in _ON_FOUR)]
    for axes, world_size in worlds:
        for checkpointing, precision in itertools.product(
            ("none", "full"), ("float32", "bfloat16")
        ):
            is_first = (checkpointing, precision) == ("none", "float32")
            yield Case(
                parallel=ParallelConfig(**axes),
                checkpointing=checkpointing,  # type: ignore[arg-type]
                precision=precision,  # type: ignore[arg-type]
                passes=4 if "pipeline" in axes else 1 + is_first,
                clips=is_first,
                world_size=world_size,
            )


class _MeasuredError(Exception):
    """Ends a run before it saves, which is not measured."""


def predicted_bytes(config: RunConfig, world_size: int) -> int:
    """Returns the forecast of a run on accelerators."""
    found = forecast(config, world_size, on_accelerator=True).memory_bytes
    assert found is not None
    return found


def measured_bytes(pool: RankPool, config: RunConfig) -> int:
    """Returns the peak of the second step on the fullest rank."""
    shutil.rmtree(config.out, ignore_errors=True)
    return max(peak for peak, _ in pool.run(_train, config, False))


def _train(rank: int, world_size: int, config: RunConfig, explains: bool) -> tuple[int, str]:
    """Trains on this rank; returns the peak of the last step, and what was alive then."""
    device = devices.device_of(rank)
    if devices.is_emulated():
        devices.emulated().fuse_kernels()
    gc.collect()  # Garbage of the last case must not be freed during this one.
    peaks: list[int] = []
    alive: list[str] = []

    class Watched(loop.TrainingStep):
        def run(self, *arguments: Any, **keywords: Any) -> Any:
            accelerator.reset_peak(device)
            if explains and len(peaks) == _STEPS - 1:
                with LiveTensors(device) as live:
                    result = super().run(*arguments, **keywords)
                alive.append(live.at_peak())
            else:
                result = super().run(*arguments, **keywords)
            peaks.append(accelerator.peak_allocated_bytes(device))
            if len(peaks) == _STEPS:
                raise _MeasuredError
            return result

    with mock.patch.object(loop, "TrainingStep", Watched), contextlib.suppress(_MeasuredError):
        run(config, devices.session_of(rank, world_size))
    return peaks[-1], "".join(alive)


def main() -> int:
    """Measures all cases, and records them beside their forecasts."""
    parser = study_parser(__doc__)
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--explain", action="store_true", help="print what is alive at the peak")
    arguments = parser.parse_args()
    if devices.backend() == "gloo":
        parser.error("PACELINE_TEST_DEVICE names no accelerator")
    chosen = [case for case in memory_cases() if arguments.only in case.name]
    for world_size, own in itertools.groupby(chosen, key=lambda case: case.world_size):
        with (
            tempfile.TemporaryDirectory() as place,
            RankPool(world_size, backend=devices.backend(), timeout_s=300) as pool,
        ):
            base = base_run(pathlib.Path(place))
            for case in own:
                config = case.config(base)
                if arguments.explain:
                    shutil.rmtree(config.out, ignore_errors=True)
                    print(case.name, *pool.run(_train, config, True)[0], sep="\n", flush=True)
                    continue
                measured = measured_bytes(pool, config)
                predicted = predicted_bytes(config, world_size)
                print(f"{predicted / measured:.4f} {measured:>12,} {case.name}", flush=True)
                append_record(
                    arguments.store,
                    "device_memory",
                    _case_fields(case, config),
                    {"peak_bytes": measured, "predicted_bytes": predicted},
                )
    return 0


def _case_fields(case: Case, config: RunConfig) -> dict[str, Any]:
    step = BatchShape(num_sequences=config.training.micro_batch_size, context_length=_CONTEXT)
    return {
        "strategy": case.parallel.strategy,
        "layout": case.layout,
        **model_case_fields("4 blocks", config.model.shape, step),
        "precision": case.precision,
        "activation_checkpointing": case.checkpointing,
        "passes": case.passes,
        "clips": case.clips,
        "world_size": case.world_size,
        **describe_hardware(devices.device_of(0)).as_case(),
        "threads": 1,
    }


if __name__ == "__main__":
    sys.exit(main())
