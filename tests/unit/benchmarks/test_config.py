import pytest

from paceline.benchmarks.config import (
    AttentionSweep,
    CollectiveSweep,
    DataParallelSweep,
    LayoutSweep,
    StepSweep,
)
from paceline.core import UsageError
from paceline.core.errors import ShapeError


def test_a_sweep_is_every_combination() -> None:
    sweep = StepSweep(
        model=("small", "medium"),
        context=(128, 256),
        phase=("forward", "train"),
        precision=("float32", "bfloat16"),
        warmup=(0, 5),
    )
    cases = list(sweep.cases())
    assert len(cases) == len(set(cases)) == 32
    assert [case.model for case in cases] == ["small"] * 16 + ["medium"] * 16


def test_the_handouts_attention_sweep_is_the_default() -> None:
    cases = list(AttentionSweep().cases())
    assert len(cases) == 20
    assert {case.head_dim for case in cases} == {16, 32, 64, 128}
    assert {case.batch.context_length for case in cases} == {256, 1024, 4096, 8192, 16384}
    assert {case.batch.num_sequences for case in cases} == {8}
    assert {case.sweep.steps for case in cases} == {100}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: StepSweep(steps=0), "--steps"),
        (lambda: StepSweep(warmup=(-1,)), "--warmup"),
        (lambda: StepSweep(compile=True, compile_blocks=True), "--compile-blocks"),
        (lambda: AttentionSweep(head_dim=(0,)), "--head-dim"),
        (lambda: list(StepSweep(model=("tiny",)).cases()), "unknown model 'tiny'"),
        (lambda: list(StepSweep(model=("xxl",)).cases()), "cannot build feed_forward='linear'"),
        (lambda: CollectiveSweep(world_sizes=(1,)), "--world-sizes"),
        (lambda: CollectiveSweep(timeout_s=0), "--timeout-s"),
        (lambda: list(CollectiveSweep(sizes=("big",)).cases()), "'big'"),
    ],
)
def test_nonsense_names_its_flag(make: object, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        make()  # type: ignore[operator]


def test_too_long_a_context_names_model_and_limit() -> None:
    with pytest.raises(ShapeError, match=r"--context 4096 .* 2048 .*'small'"):
        list(StepSweep(context=(4096,)).cases())


def test_compressions_apply_to_the_strategies_that_have_them() -> None:
    sweep = DataParallelSweep(
        strategies=("torch_ddp", "flat", "ddp"), compression=("bf16", "int4", "powersgd")
    )
    assert [variant.label for variant in sweep.variants()] == [
        *("torch_ddp bf16 25 MiB", "torch_ddp powersgd 25 MiB", "flat"),
        *("ddp bf16 25 MiB", "ddp int4 25 MiB"),
    ]
    with pytest.raises(UsageError, match="one of strategy torch_ddp, and flat has none"):
        DataParallelSweep(strategies=("flat", "ddp"), compression=("powersgd",))


def test_bucket_sizes_apply_to_the_strategies_that_have_buckets() -> None:
    sweep = DataParallelSweep(strategies=("torch_ddp", "flat", "ddp"), bucket_size_mb=(5.0, "auto"))
    (case,) = sweep.cases()
    assert [variant.label for variant in case.variants] == [
        "torch_ddp 5 MiB",
        "flat",
        "ddp 5 MiB",
        "ddp auto",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_size_mb": (0.0,)}, "--bucket-size-mb"),
        ({"world_size": 0}, "--world-size"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"time_limit_s": 0.0}, "--time-limit-s"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataParallelSweep(**arguments)


def test_layouts_of_one_sweep_have_as_many_ranks() -> None:
    with pytest.raises(UsageError, match=r"pipeline=4,micro=1 has 4"):
        LayoutSweep(layouts=("pipeline=2", "pipeline=4"))
    with pytest.raises(UsageError, match="--world-size is 4"):
        LayoutSweep(layouts=("pipeline=2",), world_size=4)


def test_what_cannot_run_is_refused_before_ranks_start() -> None:
    sweep = LayoutSweep(layouts=("pipeline=2,micro=8",), batch_size=8)
    with pytest.raises(UsageError, match="pipeline=2,micro=8: pipeline 2 needs at least as many"):
        list(sweep.cases())
    sweep = LayoutSweep(layouts=("replicate=2,micro=3",), batch_size=8)
    with pytest.raises(UsageError, match="--batch-size 8 is not divisible by the 6 sequences"):
        list(sweep.cases())


def test_a_case_has_all_layouts_and_cuts_the_same_batch() -> None:
    (case,) = LayoutSweep(layouts=("replicate=2,micro=2", "pipeline=2,micro=1")).cases()
    assert [spec.num_micro_batches(8) for spec in case.sweep.specs] == [2, 8]
