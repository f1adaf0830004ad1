"""A fake machine to run a loop without training: losses lie on a known surface."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from paceline.accounting.counts import model_segments
from paceline.benchmarks.config import CALIBRATED_OPERATIONS
from paceline.core.specs import BatchShape, ModelShape
from paceline.loop.directory import LoopDirectory, LoopSpec
from paceline.loop.run import LoopRunner
from paceline.loop.sweep import SweepRunner
from paceline.records import RecordStore
from tests.unit.loop.fake_runs import FakeExecutor
from tests.unit.predict.calibration_cases import make_record

SPEC = LoopSpec(
    budget=1e14, exploration=1.0, vocab_size=256, context_length=256, most_tokens=5e7, seed=0
)


@dataclasses.dataclass
class FakeCalibration:
    """Writes the calibration records of a fictitious, very fast machine."""

    calls: list[int] = dataclasses.field(default_factory=list)
    """The world sizes that were calibrated, in order."""

    def __call__(
        self, models: Sequence[tuple[ModelShape, BatchShape]], ranks: int, store: pathlib.Path
    ) -> None:
        self.calls.append(ranks)
        place = {"world_size": ranks, "threads": 2 // ranks}
        records = []
        for shape, batch in models:
            records += [
                make_record(
                    "linear",
                    1e-6,
                    tokens=batch.tokens_per_pass,
                    inputs=linear.inputs,
                    outputs=linear.outputs,
                    **place,
                )
                for segment in model_segments(shape)
                for linear in segment.linears
            ]
            heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.key_value_heads}
            records.append(
                make_record(
                    "attention",
                    1e-6,
                    batch=batch.num_sequences,
                    context=batch.context_length,
                    head_dim=shape.head_width,
                    attention="sdpa",
                    **heads,
                    **place,
                )
            )
        records.sort(key=lambda record: record.case["quantity"] != "linear")
        for quantity in ("stream", "copy", "call", "optimizer"):
            records.append(make_record(quantity, 1e-9, **place))
        if ranks > 1:
            for operation in CALIBRATED_OPERATIONS:
                sizes = {"smallest_bytes": 1, "largest_bytes": 10**9}
                records.append(
                    make_record("collective", 1.0, operation=operation, **sizes, **place)
                )
                records.append(
                    make_record("contention", 1e-12, operation=operation, size_bytes=4, **place)
                )
        for record in records:
            RecordStore(store).append(record)


def make_runner(
    path: pathlib.Path,
    executor: FakeExecutor,
    *,
    calibrate: FakeCalibration | None = None,
    deadline_s: float | None = None,
    tell: Callable[[str, Sequence[str]], None] = lambda _stage, _lines: None,
) -> LoopRunner:
    """Returns a loop whose runs are executed by `executor`."""
    directory = LoopDirectory(path / "loop")
    return LoopRunner(
        directory=directory,
        sweep=SweepRunner(
            directory=directory.sweep,
            make_executor=lambda _state: executor,
            ranks=1,
            threads=lambda _state: 1,
            on_change=lambda: None,
        ),
        trainer=executor,
        calibrate=calibrate or FakeCalibration(),
        ranks=(1, 2),
        history=path / "history.jsonl",
        deadline_s=deadline_s,
        tell=tell,
    )
