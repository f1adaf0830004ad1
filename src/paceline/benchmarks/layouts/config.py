"""Configuration of layout benchmarks. Free of torch, because the command line imports it."""

import dataclasses
from collections.abc import Iterator

from paceline.benchmarks.harness.config import ModelName, RankSweep, ShapeOverrides, require_counts
from paceline.benchmarks.layouts.layout_text import WrittenLayout, parse_layout
from paceline.core.errors import UsageError
from paceline.core.runnable import Work, require_runnable
from paceline.core.specs import ModelShape, require_buildable, require_context


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """One model and batch under several layouts."""

    model: str
    shape: ModelShape
    batch_size: int
    """Sequences per step, over all ranks."""
    context_length: int
    layouts: tuple[WrittenLayout, ...]
    warmup: int
    rounds: int

    def num_micro_batches(self, written: WrittenLayout) -> int:
        """Returns the number of micro-batches of a data-parallel rank per step."""
        return written.num_micro_batches(self.batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutSweep(RankSweep):
    """Time training steps of one batch under several layouts, interleaved on the same ranks."""

    layouts: tuple[str, ...] = ("replicate=2,micro=1", "pipeline=2,micro=1")
    """Layouts such as pipeline=2,interleave=2,micro=1. Keys: replicate, shard (with zero=2 or 3),
    context, tensor (with sp=1), pipeline, interleave, micro (sequences per micro-batch)."""
    model: tuple[ModelName, ...] = ("small",)
    """Model presets to measure."""
    batch_size: int = 8
    """Global batch size: sequences per step, over all ranks."""
    context: int = 128
    """Context length, in tokens."""
    shape: ShapeOverrides = dataclasses.field(default_factory=ShapeOverrides)
    warmup: int = 2
    """Warm-up rounds before measuring."""
    rounds: int = 10
    """Rounds to measure; a round is one step of every layout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(warmup=(self.warmup,), steps=self.rounds, name="--rounds")
        written = [parse_layout(text) for text in self.layouts]
        sizes = {each.layout.world_size for each in written}
        if len({*sizes, self.world_size or next(iter(sizes), 1)}) > 1:
            found = ", ".join(f"{each.text} has {each.layout.world_size}" for each in written)
            given = "" if self.world_size is None else f", --world-size is {self.world_size}"
            raise UsageError(f"--layouts must all have the same number of ranks: {found}{given}")

    def cases(self) -> Iterator[LayoutCase]:
        """Yields one case per model, with all layouts."""
        for name in self.model:
            label, shape = self.shape.apply(name)
            require_buildable(shape)
            require_context(name, shape, self.context)
            case = LayoutCase(
                model=label,
                shape=shape,
                batch_size=self.batch_size,
                context_length=self.context,
                layouts=tuple(parse_layout(text) for text in self.layouts),
                warmup=self.warmup,
                rounds=self.rounds,
            )
            for written in case.layouts:
                _require_runs(case, written)
            yield case


def _require_runs(case: LayoutCase, written: WrittenLayout) -> None:
    per_pass = written.layout.data_parallel * written.micro_batch
    if case.batch_size % per_pass:
        raise UsageError(
            f"--layouts {written.text}: --batch-size {case.batch_size} is not divisible by the "
            f"{per_pass} sequences of a pass; change --batch-size or micro"
        )
    if written.zero_bubble and written.layout.sharding == "parameters":
        raise UsageError(
            f"--layouts {written.text}: torch's zero bubble loses the gradients of parameters that "
            "ZeRO-3 reshards after forward; use zero=2, or leave zb out"
        )
    work = Work(
        shape=case.shape,
        context_length=case.context_length,
        num_micro_batches=case.num_micro_batches(written),
    )
    require_runnable(written.layout, work, f"--layouts {written.text}")
