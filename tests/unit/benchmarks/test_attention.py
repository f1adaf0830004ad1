import pytest
import torch

from paceline.accounting import minimum_attention_bytes
from paceline.benchmarks.attention import AttentionRun, attention_case_fields, measure_attention
from paceline.benchmarks.config import AttentionCase, AttentionSweep
from paceline.benchmarks.devices import Place
from paceline.records import find_kind


def make_case(context: int, head_dim: int = 16, causal: bool = False) -> AttentionCase:
    sweep = AttentionSweep(
        head_dim=(head_dim,), context=(context,), batch=2, causal=causal, warmup=1, steps=3
    )
    return next(sweep.cases())


def test_what_is_kept_for_backward_is_counted_to_the_byte() -> None:
    for context, head_dim in ((32, 8), (64, 16), (128, 16)):
        run = AttentionRun(make_case(context, head_dim), torch.device("cpu"))
        vectors = 2 * context * head_dim * 4
        probabilities = 2 * context * context * 4
        # Query, key and value, and the probabilities, which both products' gradients need.
        assert run.saved_bytes() == 3 * vectors + probabilities


@pytest.mark.parametrize(("context", "head_dim"), [(64, 16), (256, 128), (1024, 8)])
def test_the_lower_bound_is_one(context: int, head_dim: int) -> None:
    case = make_case(context, head_dim)
    bound = minimum_attention_bytes(case.batch, head_dim, 4, compiled=False)
    peak = AttentionRun(case, torch.device("cpu")).peak_bytes()
    assert bound <= peak < 1.1 * bound


def test_both_passes_are_measured() -> None:
    metrics = measure_attention(make_case(64, causal=True), lambda _done, _total: None)
    assert len(metrics["forward_time_s"].samples) == 3
    assert len(metrics["backward_time_s"].samples) == 3
    assert metrics["peak_bytes"].value > metrics["saved_for_backward_bytes"].value


def test_the_case_of_the_record_has_every_declared_field() -> None:
    place = Place(device="cpu", hardware="test", threads=1)
    fields = attention_case_fields(make_case(32), place)
    kind = find_kind("attention")
    assert set(fields) == {*kind.join_key, *kind.method}


@pytest.mark.gpu
def test_the_peak_on_a_gpu_holds_the_scores() -> None:
    case = AttentionSweep(head_dim=(64,), context=(2048,), batch=2, device="cuda")
    run = AttentionRun(next(case.cases()), torch.device("cuda"))
    assert run.peak_bytes() > 2 * 2 * 2048 * 2048 * 4
