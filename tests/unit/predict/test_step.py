"""Tests of step predictions: values computed by hand, and properties for any numbers."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting import count_parameters
from paceline.accounting.memory.model_states import parameter_sizes
from paceline.core import BatchShape, ModelShape, UsageError
from paceline.core.strategies import BUCKET_STRATEGIES, SHARDED_STATE, StrategyName
from paceline.predict.step import (
    PREDICTED,
    StepTerms,
    compute_time,
    gradient_collectives,
    strategy_step_terms,
)
from tests.unit.predict.calibration_cases import PRODUCT_S, make_calibration

SHAPE = ModelShape(vocab_size=1000, d_model=256, d_ff=1024, num_layers=4, num_heads=4)
BATCH = BatchShape(num_sequences=4, context_length=128)
NUM_PARAMETERS = count_parameters(SHAPE).total

SENDING = [name for name in PREDICTED if name != "none"]
communicating = st.sampled_from(SENDING)


def _terms(strategy: StrategyName, **calibration: float) -> StepTerms:
    return strategy_step_terms(SHAPE, BATCH, strategy, make_calibration(**calibration))  # type: ignore[arg-type]


def test_computing_is_the_sum_of_its_parts() -> None:
    computing = compute_time(SHAPE, BATCH, make_calibration())
    products = BATCH.tokens_per_pass * count_parameters(SHAPE).matmul
    assert computing.terms()["matmul_s"] == pytest.approx(3 * PRODUCT_S * products)
    scores = 4 * BATCH.tokens_per_pass * 128 * 256
    assert computing.terms()["attention_s"] == pytest.approx(3 * PRODUCT_S * scores)
    # The head's gradient is complete after the first part of backward, the embedding's at the end.
    assert computing.completed_after()[-1] == 1
    assert computing.completed_after()[0] == len(computing.backward)


@pytest.mark.parametrize("strategy", PREDICTED)
def test_a_rank_alone_computes_and_updates(strategy: StrategyName) -> None:
    calibration = make_calibration(world_size=1)
    terms = strategy_step_terms(SHAPE, BATCH, strategy, calibration)
    computing = compute_time(SHAPE, BATCH, calibration)
    assert terms.total_s == pytest.approx(
        computing.forward_s + computing.backward_s + 1.5e-9 * NUM_PARAMETERS
    )


def test_nothing_hides_a_flat_message() -> None:
    terms = _terms("flat")
    num_bytes = 4 * (NUM_PARAMETERS + len(parameter_sizes(SHAPE)))
    assert terms.exposed_s == pytest.approx(1e-4 + num_bytes / 1e9)
    assert terms.contention_s == 0


def test_many_messages_pay_many_calls() -> None:
    flat, naive = _terms("flat"), _terms("naive")
    num_messages = len(parameter_sizes(SHAPE))
    assert naive.exposed_s - flat.exposed_s == pytest.approx(1e-4 * (num_messages - 1))


def test_a_fast_line_leaves_the_last_bucket() -> None:
    terms = _terms("ddp", lost_s_per_byte=0.0, slowdown=1.0, bytes_per_s=1e10)
    last = gradient_collectives("ddp", parameter_sizes(SHAPE), 2)[-1]
    assert terms.exposed_s == pytest.approx(1e-4 + last.num_bytes / 1e10)


def test_a_slow_line_is_busy_from_the_first_bucket_on() -> None:
    terms = _terms("ddp", lost_s_per_byte=0.0, slowdown=1.0, bytes_per_s=1e7)
    messages = gradient_collectives("ddp", parameter_sizes(SHAPE), 2)
    sending = sum(1e-4 + message.num_bytes / 1e7 for message in messages)
    computing = compute_time(SHAPE, BATCH, make_calibration())
    backward_s = computing.backward_s + terms.bucket_copy_s
    num_segments = max(computing.completed_after()[place] for place in messages[0].parameters)
    first = sum(time.total_s for time in computing.backward[-num_segments:])
    first *= backward_s / computing.backward_s
    assert terms.exposed_s == pytest.approx(first + sending - backward_s)


def test_computing_loses_to_every_byte_that_is_hidden() -> None:
    terms = _terms("ddp", lost_s_per_byte=1e-9, bytes_per_s=9e8, slowdown=1.0)
    messages = gradient_collectives("ddp", parameter_sizes(SHAPE), 2)
    hidden = sum(message.num_bytes for message in messages[:-1])
    everything = hidden + messages[-1].num_bytes
    assert 1e-9 * hidden * 0.95 <= terms.contention_s <= 1e-9 * everything


@pytest.mark.parametrize("strategy", SENDING)
@pytest.mark.parametrize("bytes_per_s", [1e7, 1e9, 1e11])
def test_computing_loses_no_more_than_by_waiting(
    strategy: StrategyName, bytes_per_s: float
) -> None:
    terms = _terms(strategy, lost_s_per_byte=1.0, bytes_per_s=bytes_per_s)
    messages = gradient_collectives(strategy, parameter_sizes(SHAPE), 2)
    alone = sum(1e-4 + message.num_bytes / bytes_per_s for message in messages)
    if strategy in SHARDED_STATE:
        # Updated parameters are gathered too, in as many messages or in one.
        alone *= 2
    assert terms.contention_s + terms.exposed_s <= alone * (1 + 1e-9)


def test_tied_embeddings_wait_for_both_uses() -> None:
    tied = dataclasses.replace(SHAPE, tied_embeddings=True)
    calibration = make_calibration(bytes_per_s=1e10)
    terms = strategy_step_terms(tied, BATCH, "ddp", calibration)
    table = 4 * SHAPE.vocab_size * SHAPE.d_model
    # The gradient of tied embeddings is complete last.
    assert terms.exposed_s >= table / 1e10


def test_dividing_the_state_divides_the_update() -> None:
    assert _terms("zero2").optimizer_s == pytest.approx(_terms("ddp").optimizer_s / 2)


@given(
    communicating,
    st.floats(1e6, 1e11),
    st.floats(1.0, 50.0),
    st.floats(1e-6, 1e-1),
    st.floats(0.0, 1e-7),
    st.floats(1.0, 4.0),
)
def test_faster_links_never_slow_a_step(
    strategy: StrategyName,
    bytes_per_s: float,
    faster: float,
    latency_s: float,
    lost_s_per_byte: float,
    slowdown: float,
) -> None:
    rest = {"latency_s": latency_s, "lost_s_per_byte": lost_s_per_byte, "slowdown": slowdown}
    slow = _terms(strategy, bytes_per_s=bytes_per_s, **rest)
    fast = _terms(strategy, bytes_per_s=faster * bytes_per_s, **rest)
    assert fast.total_s <= slow.total_s * (1 + 1e-6)


@given(communicating, st.floats(1e6, 1e11))
def test_no_term_is_negative(strategy: StrategyName, bytes_per_s: float) -> None:
    terms = _terms(strategy, bytes_per_s=bytes_per_s)
    assert min(vars(terms).values()) >= 0
    assert terms.total_s >= _terms("none").total_s - _terms("none").optimizer_s


def test_what_is_not_predicted_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torch_fsdp2.*not predicted yet; predicted: none, naive"):
        _terms("torch_fsdp2")
    with pytest.raises(UsageError, match="no buckets"):
        strategy_step_terms(SHAPE, BATCH, "flat", make_calibration(), 25.0)
    assert set(BUCKET_STRATEGIES) & set(PREDICTED) == {"ddp", "torch_ddp", "zero2"}


def test_a_gpu_hides_launches_behind_its_work() -> None:
    on_cpu = make_calibration()
    on_gpu = dataclasses.replace(on_cpu, topology={**on_cpu.topology, "device": "cuda"})
    eager, hidden = (compute_time(SHAPE, BATCH, each).forward for each in (on_cpu, on_gpu))
    for plain, behind in zip(eager, hidden, strict=True):
        busy_s = plain.total_s - plain.launch_s
        assert behind.total_s == pytest.approx(max(busy_s, plain.launch_s))
