import dataclasses

import pytest

from paceline.accounting.counts import count_parameters
from paceline.benchmarks.options import parse_layout
from paceline.core.plan import ActivationCheckpointing
from paceline.core.presets import model_preset
from paceline.core.specs import BatchShape, ModelShape, precision_preset
from paceline.predict.trainer_memory import trainer_memory

_MEASURED = {
    "replicate=4,micro=2": 149_513_452,
    "replicate=4,micro=1": 151_997_676,
    "shard=4,zero=3,micro=2": 75_945_964,
    "shard=4,zero=3,micro=1": 80_003_052,
    "shard=4,zero=2,micro=2": 93_255_652,
    "shard=4,zero=2,micro=1": 97_442_788,
    "replicate=2,shard=2,zero=3,micro=2": 95_223_532,
    "pipeline=4,micro=1": 57_182_280,
    "replicate=2,pipeline=2,micro=1": 87_998_576,
    "replicate=2,pipeline=2,interleave=2,micro=1": 92_195_952,
    "shard=2,pipeline=2,zero=2,micro=1": 68_721_776,
    "replicate=2,tensor=2,micro=4": 107_191_532,
    "shard=2,tensor=2,zero=3,sp=1,micro=4": 73_987_820,
    "tensor=4,micro=8": 95_469_804,
    "tensor=2,pipeline=2,micro=2": 54_444_144,
    "tensor=2,pipeline=2,sp=1,micro=2": 51_685_488,
    "replicate=2,context=2,micro=4": 152_855_788,
    "shard=2,context=2,zero=2,micro=2": 98_951_652,
    "context=2,tensor=2,micro=8": 112_104_684,
}
"""`peak_bytes` of `paceline bench layout`: bytes-6M, 8 sequences of 128 tokens, 4 ranks."""


_MEASURED_BY_TECHNIQUE = {
    ("tensor=2,micro=4", "float32", "full"): 66.8e6,
    ("tensor=2,micro=4", "bfloat16", "none"): 98.9e6,
    ("tensor=2,micro=4", "bfloat16", "full"): 65.2e6,
    ("tensor=2,sp=1,micro=4", "float32", "full"): 64.2e6,
    ("tensor=2,sp=1,micro=4", "bfloat16", "none"): 92.1e6,
    ("tensor=2,sp=1,micro=4", "bfloat16", "full"): 63.7e6,
    ("pipeline=2,micro=1", "float32", "full"): 58.1e6,
    ("pipeline=2,micro=1", "bfloat16", "none"): 79.9e6,
    ("pipeline=2,micro=1", "bfloat16", "full"): 60.2e6,
    ("context=2,micro=4", "float32", "full"): 141.7e6,
    ("context=2,micro=4", "bfloat16", "none"): 172.8e6,
    ("context=2,micro=4", "bfloat16", "full"): 145.7e6,
}
"""Peak bytes of the same steps on 2 ranks, under autocast and with recomputed blocks."""


_MEASURED_ON_ACCELERATOR = {
    ("tensor=2,micro=4", "bfloat16", "none"): 21_720_576,
    ("tensor=2,sp=1,micro=2", "float32", "none"): 20_945_920,
    ("pipeline=2,micro=1", "float32", "full"): 17_754_112,
    ("pipeline=2,interleave=2,micro=1", "bfloat16", "none"): 24_610_816,
    ("pipeline=2,interleave=2,micro=1", "float32", "full"): 18_491_392,
    ("replicate=2,shard=2,zero=3,micro=2", "float32", "none"): 32_549_888,
    ("shard=2,tensor=2,zero=3,micro=2", "float32", "none"): 17_341_440,
    ("shard=2,pipeline=2,zero=2,micro=1", "float32", "none"): 18_544_640,
}
"""Peak bytes of the emulated accelerator's allocator: `studies.planner.device_memory`."""


def _peak(
    text: str,
    shape: ModelShape,
    batch_size: int = 8,
    context_length: int = 128,
    precision: str = "float32",
    checkpointing: ActivationCheckpointing = "none",
    *,
    on_accelerator: bool = False,
) -> float:
    written = parse_layout(text)
    batch = BatchShape(
        num_sequences=written.micro_batch,
        context_length=context_length,
        accumulation_steps=batch_size // (written.layout.data_parallel * written.micro_batch),
    )
    layout = dataclasses.replace(written.layout, activation_checkpointing=checkpointing)
    of_run = precision_preset(precision)
    return trainer_memory(layout, shape, batch, of_run, on_accelerator=on_accelerator).total


@pytest.mark.parametrize("layout", _MEASURED)
def test_peaks_are_those_that_were_measured(layout: str) -> None:
    assert _peak(layout, model_preset("bytes-6M")) == pytest.approx(_MEASURED[layout], rel=0.025)


@pytest.mark.parametrize(("layout", "precision", "checkpointing"), _MEASURED_BY_TECHNIQUE)
def test_peaks_of_autocast_and_recomputation_are_those_that_were_measured(
    layout: str, precision: str, checkpointing: ActivationCheckpointing
) -> None:
    shape = model_preset("bytes-6M")
    peak = _peak(layout, shape, precision=precision, checkpointing=checkpointing)
    measured = _MEASURED_BY_TECHNIQUE[layout, precision, checkpointing]
    assert peak == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("layout", "precision", "checkpointing"), _MEASURED_ON_ACCELERATOR)
def test_peaks_on_accelerators_are_those_that_were_measured(
    layout: str, precision: str, checkpointing: ActivationCheckpointing
) -> None:
    shape = ModelShape(
        vocab_size=512, d_model=192, d_ff=512, num_layers=4, num_heads=4, max_context_length=64
    )
    batch_size = 4 * parse_layout(layout).layout.data_parallel
    peak = _peak(layout, shape, batch_size, 64, precision, checkpointing, on_accelerator=True)
    measured = _MEASURED_ON_ACCELERATOR[layout, precision, checkpointing]
    assert peak == pytest.approx(measured, rel=0.0075)


def test_parts_add_up_to_the_peak() -> None:
    written = parse_layout("shard=2,tensor=2,zero=3,micro=4")
    shape = model_preset("bytes-6M")
    parts = trainer_memory(written.layout, shape, BatchShape(num_sequences=4, context_length=128))
    # Norms are on every tensor rank; everything else is divided over four ranks.
    assert parts.parameters == pytest.approx(count_parameters(shape).total, rel=0.01)
    assert parts.gradients == parts.parameters
    assert parts.optimizer_state == pytest.approx(2 * parts.parameters, abs=1)
    assert parts.activations > 0


def test_without_tokens_to_speak_of_a_rank_holds_states_gradients_and_what_is_gathered() -> None:
    shape = ModelShape(
        vocab_size=16, d_model=512, d_ff=2048, num_layers=6, num_heads=8, max_context_length=4
    )
    block = 4 * (4 * 512 * 512 + 3 * 512 * 2048)

    def blocks(layout: str, micro: int) -> float:
        return _peak(f"{layout},micro={micro}", shape, 2, 4) / block

    # Parameters, both moments and gradients: four copies, none of them sharded.
    assert blocks("tensor=1", 2) == pytest.approx(6 * 4, rel=0.01)
    # Three states, and FSDP2's copy of each block, which averaged gradients replace block by block;
    # plus the current block's gradients and the input of the previous reduction.
    assert blocks("replicate=2", 1) == pytest.approx(6 * 4 + 2, rel=0.01)
    # Half of the states and of four blocks' gradients. The second block runs backward; it adds its
    # gathered copy, the next one's, its gradients and the input of the previous reduction.
    assert blocks("shard=2,zero=3", 1) == pytest.approx(6 * 1.5 + 4 * 0.5 + 4, rel=0.02)


def test_the_fullest_rank_counts() -> None:
    # The vocabulary is large, and the last stage holds the logits.
    shape = ModelShape(vocab_size=50_000, d_model=64, d_ff=128, num_layers=4, num_heads=4)
    logits = 3 * 4 * 128 * 50_000
    assert _peak("pipeline=2,micro=1", shape) > logits


def test_tied_embeddings_are_on_both_ends_of_a_pipeline() -> None:
    tied = ModelShape(
        vocab_size=5000, d_model=64, d_ff=128, num_layers=4, num_heads=4, tied_embeddings=True
    )
    untied = ModelShape(vocab_size=5000, d_model=64, d_ff=128, num_layers=4, num_heads=4)
    assert _peak("pipeline=2,micro=1", tied) == _peak("pipeline=2,micro=1", untied)
    assert _peak("replicate=2,micro=1", tied) < _peak("replicate=2,micro=1", untied)
