import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline.accounting import attention_saved_bytes
from paceline.accounting.attention import (
    attention_flops,
    minimum_attention_bytes,
    tiled_attention_peak_bytes,
)
from paceline.benchmarks.attention import (
    AttentionRun,
    attention_case_fields,
    attention_obstacle,
    attention_records,
    do_bench_samples,
    measure_attention,
)
from paceline.benchmarks.config import AttentionCase, AttentionSweep
from paceline.benchmarks.harness.measure import TORCH_DTYPES
from paceline.core.units import MIB
from paceline.devices.hardware import HardwareLocation
from paceline.records import find_kind

CPU = torch.device("cpu")
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def make_case(context: int, head_dim: int = 16, **options: Any) -> AttentionCase:
    options = {"batch": 2, "warmup": 1, "steps": 3, "device": "cpu"} | options
    for field in ("implementation", "dtype"):
        if field in options:
            options[field] = (options[field],)
    return next(AttentionSweep(head_dim=(head_dim,), context=(context,), **options).cases())


def element_bytes(case: AttentionCase) -> int:
    return TORCH_DTYPES[case.dtype].itemsize


def ignore_progress(_completed: int, _total: int) -> None:
    pass


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["naive", "tiled", "sdpa"])
def test_what_is_kept_for_backward_is_counted_to_the_byte(
    implementation: str, dtype: str, causal: bool
) -> None:
    for context, head_dim in ((32, 8), (300, 16)):
        case = make_case(
            context, head_dim, implementation=implementation, dtype=dtype, causal=causal
        )
        expected = attention_saved_bytes(
            case.implementation, case.batch, head_dim, element_bytes(case), causal=causal
        )
        assert AttentionRun(case, CPU).saved_bytes() == expected


@pytest.mark.parametrize(("context", "head_dim"), [(64, 16), (256, 128), (1024, 8)])
def test_the_lower_bound_is_one(context: int, head_dim: int) -> None:
    case = make_case(context, head_dim)
    bound = minimum_attention_bytes("naive", case.batch, head_dim, 4, compiled=False)
    peak = AttentionRun(case, CPU).peak_bytes()
    assert bound <= peak < 1.1 * bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["tiled", "sdpa"])
def test_the_linear_bound_is_one_too(implementation: str, dtype: str) -> None:
    case = make_case(4096, 64, implementation=implementation, dtype=dtype, batch=1)
    linear, square = (
        minimum_attention_bytes(name, case.batch, 64, element_bytes(case), compiled=False)
        for name in (case.implementation, "naive")
    )
    assert linear <= AttentionRun(case, CPU).peak_bytes() < square / 5


@pytest.mark.parametrize(
    ("batch", "context", "head_dim", "dtype", "causal"),
    [
        (1, 512, 32, "float32", False),
        (1, 700, 16, "float32", True),
        (2, 512, 64, "float32", True),
        (3, 1300, 16, "bfloat16", False),
        (9, 512, 16, "bfloat16", True),
    ],
)
def test_the_peak_of_tiles_is_known_to_the_byte(
    batch: int, context: int, head_dim: int, dtype: str, causal: bool
) -> None:
    case = make_case(
        context, head_dim, batch=batch, dtype=dtype, causal=causal, implementation="tiled"
    )
    expected = tiled_attention_peak_bytes(case.batch, head_dim, element_bytes(case), causal=causal)
    assert AttentionRun(case, CPU).peak_bytes() == expected


def slopes(lengths: Sequence[int], values: Sequence[float]) -> list[float]:
    """Returns the bytes per additional token, from each length to the next."""
    points = itertools.pairwise(zip(lengths, values, strict=True))
    return [(after[1] - before[1]) / (after[0] - before[0]) for before, after in points]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_tiles_take_memory_in_proportion_to_the_tokens(dtype: str) -> None:
    saved, measured, expected = [], [], []
    for length in LENGTHS:
        case = make_case(length, 32, batch=1, dtype=dtype, causal=True, implementation="tiled")
        run = AttentionRun(case, CPU)
        saved.append(run.saved_bytes())
        measured.append(run.peak_bytes())
        expected.append(
            tiled_attention_peak_bytes(case.batch, 32, element_bytes(case), causal=True)
        )
    assert slopes(LENGTHS, measured) == pytest.approx(slopes(LENGTHS, expected), rel=0.05)
    # From 4,096 tokens on, tiles have their full width and the bytes per token are constant.
    assert len(set(slopes(LENGTHS[2:], expected[2:]))) == 1
    assert [value * LENGTHS[0] for value in saved] == [saved[0] * length for length in LENGTHS]


def test_stored_scores_take_memory_with_the_square_of_the_tokens() -> None:
    lengths = LENGTHS[:3]
    runs = [AttentionRun(make_case(length, batch=1), CPU) for length in lengths]
    for values in ([run.saved_bytes() for run in runs], [run.peak_bytes() for run in runs]):
        first, second = slopes(lengths, values)
        # Between n and 2n, a square grows by 3n per token, and vectors grow at a constant rate.
        assert 1.9 < second / first < 2.05


@pytest.mark.parametrize("implementation", ["naive", "tiled", "sdpa"])
def test_both_passes_are_measured(implementation: str) -> None:
    case = make_case(64, causal=True, implementation=implementation)
    metrics = measure_attention(case, ignore_progress)
    forward, backward, both = (
        metrics[f"{name}_time_s"].samples for name in ("forward", "backward", "both")
    )
    assert len(forward) == 3
    assert both == pytest.approx([sum(laps) for laps in zip(forward, backward, strict=True)])
    assert metrics["peak_bytes"].value > metrics["saved_for_backward_bytes"].value
    flops = attention_flops(case.batch, case.head_dim, causal=True).total
    assert metrics["flops_per_s"].value == pytest.approx(flops / metrics["both_time_s"].value)


def test_implementations_compute_the_same() -> None:
    outputs, gradients = [], []
    for implementation in ("naive", "tiled", "sdpa"):
        run = AttentionRun(make_case(300, causal=True, implementation=implementation), CPU)
        outputs.append(run.forward())
        run.backward(outputs[-1])
        gradients.append(run.inputs[0].grad)
    for others in (outputs, gradients):
        torch.testing.assert_close(others[1], others[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(others[2], others[0], atol=1e-5, rtol=1e-5)


def test_what_is_compared_runs_next_to_each_other() -> None:
    sweep = AttentionSweep(
        implementation=("tiled", "sdpa"),
        head_dim=(16, 32),
        context=(128, 256),
        dtype=("float32", "bfloat16"),
    )
    cases = list(sweep.cases())
    assert [case.implementation for case in cases] == ["tiled", "sdpa"] * 8
    assert [case.batch.context_length for case in cases[:4]] == [128, 128, 256, 256]
    assert [case.head_dim for case in cases[:8]] == [16] * 4 + [32] * 4
    assert [case.dtype for case in cases] == ["float32"] * 8 + ["bfloat16"] * 8


def test_the_triton_kernels_are_skipped_without_cuda() -> None:
    sweep = AttentionSweep(
        implementation=("triton",), head_dim=(16,), context=(64,), batch=1, device="cpu"
    )
    (record,) = attention_records(sweep, ignore_progress)
    assert (record.outcome, record.metrics) == ("skipped", {})
    assert record.reason == "the Triton kernels need a CUDA device, this is 'cpu'"
    case = make_case(64, implementation="triton")
    assert attention_obstacle(case, torch.device("cuda")) is None
    assert attention_obstacle(make_case(64, implementation="tiled"), CPU) is None


def test_the_case_of_the_record_has_every_declared_field() -> None:
    kind = find_kind("attention")
    for device, timer in (("cpu", "stopwatch"), ("cuda", "do_bench")):
        location = HardwareLocation(device=device, hardware="test", threads=1)
        fields = attention_case_fields(make_case(32, implementation="sdpa"), location)
        assert set(fields) == {*kind.join_key, *kind.method}
        assert (fields["implementation"], fields["timer"]) == ("sdpa", timer)


@pytest.mark.parametrize("compiled", [False, True])
def test_do_bench_is_asked_for_each_pass_within_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    testing = pytest.importorskip("triton.testing")
    asked: list[dict[str, Any]] = []

    def do_bench(function: Callable[[], object], **options: Any) -> list[float]:
        for _ in range(2):
            function()
        asked.append(options)
        return [2.0, 4.0]

    monkeypatch.setattr(testing, "do_bench", do_bench)
    case = make_case(64, implementation="sdpa", compile=compiled, steps=10**9)
    run = AttentionRun(case, CPU)
    samples = do_bench_samples(run, case, ignore_progress)
    assert samples == {
        name: [0.002, 0.004] for name in ("forward_time_s", "both_time_s", "backward_time_s")
    }
    assert all(options["return_mode"] == "all" for options in asked)
    assert all(options["grad_to_none"] is run.inputs for options in asked)
    total_ms = sum(options["warmup"] + options["rep"] for options in asked)
    assert total_ms == pytest.approx(1e3 * case.sweep.limits.time_limit_s)
    assert run.peak_bytes() > 0


@pytest.mark.gpu
def test_the_peak_on_a_gpu_holds_the_scores() -> None:
    run = AttentionRun(make_case(2048, 64, device="cuda"), torch.device("cuda"))
    assert run.peak_bytes() > 2 * 2 * 2048 * 2048 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("implementation", ["naive", "tiled", "sdpa", "triton"])
def test_passes_are_timed_on_a_gpu(implementation: str, compiled: bool) -> None:
    case = make_case(
        1024,
        64,
        implementation=implementation,
        dtype="bfloat16",
        causal=True,
        compile=compiled,
        device="cuda",
        steps=20,
    )
    metrics = measure_attention(case, ignore_progress)
    forward, backward, both = (
        metrics[f"{name}_time_s"].value for name in ("forward", "backward", "both")
    )
    assert 0 < forward < both
    assert 0 < backward < both
    assert metrics["flops_per_s"].value > 0


@pytest.mark.gpu
def test_the_triton_kernels_keep_and_take_linear_memory() -> None:
    case = make_case(16384, 64, implementation="triton", device="cuda", batch=1, causal=True)
    run = AttentionRun(case, torch.device("cuda"))
    run.both()
    saved = attention_saved_bytes("triton", case.batch, 64, 4, causal=True)
    assert run.saved_bytes() == saved
    # One matrix of scores alone would take 1 GiB.
    assert run.peak_bytes() < 4 * saved + 64 * MIB
