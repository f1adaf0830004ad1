"""Tests the activation formulas against what torch saves and allocates."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.accounting import peak_activation_bytes
from paceline.accounting.memory.activations import count_activations, saved_for_backward_bytes
from paceline.core import BatchShape, ModelShape, Precision, UsageError, model_preset
from paceline.core.errors import ShapeError
from paceline.core.specs import AttentionImplementation, precision_preset
from paceline.models import TransformerLM, next_token_loss
from paceline.models.layers import RMSNorm
from paceline.traces.memory import peak_allocations
from tests.unit.accounting.memory.activation_cases import block_bytes

Checkpointing = Literal["none", "full"]

PRECISIONS = {
    "float32": Precision(),
    "bfloat16": precision_preset("bfloat16"),
    "float16": precision_preset("float16"),
    "bfloat16 weights": Precision(parameters="bfloat16", compute="bfloat16", gradients="bfloat16"),
}
SHAPES = {
    "plain": ModelShape(vocab_size=500, d_model=64, d_ff=256, num_layers=3, num_heads=4),
    "grouped, wide heads": ModelShape(
        vocab_size=96, d_model=64, d_ff=160, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24
    ),
    "large vocabulary, tied": ModelShape(
        vocab_size=4000, d_model=32, d_ff=64, num_layers=1, num_heads=2, tied_embeddings=True
    ),
    "wide stream, narrow hidden": ModelShape(
        vocab_size=50, d_model=128, d_ff=64, num_layers=2, num_heads=4
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its settings and its batch."""

    shape: ModelShape
    batch: tuple[int, int]
    attention: AttentionImplementation = "sdpa"
    precision: str = "float32"
    checkpointing: Checkpointing = "none"

    def __str__(self) -> str:
        size = f"{self.shape.vocab_size}-{self.shape.d_model}-{self.shape.num_layers}"
        how = f"{self.attention}-{self.precision}-{self.checkpointing}"
        return f"{size}-{self.batch[0]}x{self.batch[1]}-{how}"

    def saved_arguments(self) -> tuple[ModelShape, BatchShape, Checkpointing]:
        """Returns the positional arguments of the formulas."""
        batch = BatchShape(num_sequences=self.batch[0], context_length=self.batch[1])
        return self.shape, batch, self.checkpointing

    @property
    def peak(self) -> int:
        """The predicted peak if gradients are stored in buckets."""
        return peak_activation_bytes(
            *self.saved_arguments(), precision=PRECISIONS[self.precision], attention=self.attention
        )


class _Pass:
    """A model and its batch."""

    def __init__(self, case: Case) -> None:
        self.model = TransformerLM(
            case.shape, attention=case.attention, activation_checkpointing=case.checkpointing
        )
        precision = PRECISIONS[case.precision]
        self.model.to(getattr(torch, precision.parameters))
        self.autocast = getattr(torch, precision.compute) if precision.autocast else None
        self.inputs, self.targets = (
            torch.randint(case.shape.vocab_size, case.batch) for _ in range(2)
        )

    def forward(self) -> Tensor:
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            logits = self.model(self.inputs)
        return next_token_loss(logits, self.targets)

    def forward_and_backward(self) -> None:
        torch.autograd.backward(self.forward())

    def saved_bytes(self) -> int:
        """Returns the bytes that autograd saves, without parameters, buffers and the batch."""
        others = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*self.model.parameters(), *self.model.buffers())
        } | {tensor.untyped_storage().data_ptr() for tensor in (self.inputs, self.targets)}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self.forward()
        return sum(
            tensor.untyped_storage().nbytes()
            for place, tensor in saved.items()
            if place not in others
        )

    def peak(self) -> int:
        """Returns the peak allocation of a later step, which adds to existing gradients."""
        self.forward_and_backward()
        return peak_allocations({"step": self.forward_and_backward})["step"]


@pytest.fixture
def without_scratch() -> Iterator[None]:
    """Disables oneDNN: its scratch memory for 16-bit matmuls depends on the processor."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws shapes of all proportions, many of them degenerate."""
    num_kv_heads = draw(st.integers(1, 3))
    context = draw(st.integers(1, 20))
    shape = ModelShape(
        vocab_size=draw(st.integers(1, 60)),
        d_model=draw(st.integers(1, 24)),
        d_ff=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 6)),
        max_context_length=context + draw(st.integers(0, 9)),
        tied_embeddings=draw(st.booleans()),
    )
    return Case(
        shape=shape,
        batch=(draw(st.integers(1, 3)), context),
        attention=draw(st.sampled_from(["sdpa", "tiled", "naive"])),
        precision=draw(st.sampled_from(list(PRECISIONS))),
        checkpointing=draw(st.sampled_from(["none", "full"])),
    )


_SMALL = ModelShape(
    vocab_size=7, d_model=8, d_ff=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6
)
_ONE_HEAD = dataclasses.replace(_SMALL, num_heads=1, num_kv_heads=1)
_ONE_KEY_HEAD = dataclasses.replace(_SMALL, num_kv_heads=1)
_UNGROUPED = dataclasses.replace(_SMALL, num_kv_heads=4)
_NARROW = dataclasses.replace(_SMALL, d_model=1, d_ff=1, vocab_size=1, head_dim=2)


@settings(max_examples=60, deadline=None)
@given(case=cases())
@example(case=Case(shape=_SMALL, batch=(3, 1)))
@example(case=Case(shape=_SMALL, batch=(1, 1), precision="bfloat16"))
@example(case=Case(shape=_SMALL, batch=(1, 5), attention="naive"))
@example(case=Case(shape=_ONE_HEAD, batch=(2, 5)))
@example(case=Case(shape=_ONE_HEAD, batch=(2, 5), attention="naive", precision="float16"))
@example(case=Case(shape=_ONE_HEAD, batch=(1, 1), attention="tiled", checkpointing="full"))
@example(case=Case(shape=_ONE_KEY_HEAD, batch=(2, 5), attention="naive"))
@example(case=Case(shape=_UNGROUPED, batch=(2, 5), attention="naive", precision="bfloat16"))
@example(case=Case(shape=_UNGROUPED, batch=(1, 5), attention="naive"))
@example(case=Case(shape=_UNGROUPED, batch=(2, 1), attention="naive"))
@example(case=Case(shape=_NARROW, batch=(1, 1)))
@example(case=Case(shape=_NARROW, batch=(2, 3), attention="tiled", precision="bfloat16"))
@example(case=Case(shape=_NARROW, batch=(2, 3), attention="naive", precision="bfloat16 weights"))
@example(case=Case(shape=_NARROW, batch=(2, 3), precision="float16", checkpointing="full"))
def test_saved_bytes_are_those_that_torch_packs(case: Case) -> None:
    predicted = saved_for_backward_bytes(
        *case.saved_arguments(), precision=PRECISIONS[case.precision], attention=case.attention
    )
    assert predicted == _Pass(case).saved_bytes()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["grouped, wide heads", "large vocabulary, tied"])
def test_copies_of_weights_are_counted_apart(
    name: str, precision: str, checkpointing: Checkpointing
) -> None:
    case = Case(shape=SHAPES[name], batch=(2, 8), precision=precision, checkpointing=checkpointing)
    model = _Pass(case).model
    # Recomputed blocks save no copies, which leaves the final norm and the head.
    last = [model.final_norm, model.head]
    modules: list[nn.Module] = last if checkpointing == "full" else list(model.modules())
    matrices = {module.weight for module in modules if isinstance(module, nn.Linear)}
    norms = {module.weight for module in modules if isinstance(module, RMSNorm)}
    expected = {
        "float32": 0,
        "bfloat16": 2 * sum(weight.numel() for weight in matrices),
        "float16": 2 * sum(weight.numel() for weight in matrices),
        "bfloat16 weights": 4 * sum(weight.numel() for weight in norms),
    }
    saved = count_activations(*case.saved_arguments(), precision=PRECISIONS[precision]).saved
    assert saved.weight_copies == expected[precision]
    assert saved.total == saved.activations + saved.weight_copies


@pytest.mark.parametrize("attention", ["sdpa", "naive"])
def test_the_table_of_the_module(attention: AttentionImplementation) -> None:
    shape = SHAPES["grouped, wide heads"]
    batch = BatchShape(num_sequences=3, context_length=20)
    d, f, v, h, s = shape.d_model, shape.d_ff, shape.vocab_size, shape.num_heads, 20
    a, k = shape.attention_width, shape.key_value_width
    mixing = {"sdpa": 3 * a + 2 * k + h, "naive": 4 * a + h * s}[attention]
    mask = {"sdpa": 0, "naive": s**2}[attention]
    block = 4 * 60 * (2 * (3 * d + 1) + mixing + 4 * f) + mask
    assert block_bytes(shape, batch, attention=attention) == block
    saved = saved_for_backward_bytes(shape, batch, attention=attention)
    assert saved == shape.num_layers * block + 4 * (60 * (3 * d + 1 + v) + 1)


RUNS: list[tuple[tuple[int, int], Checkpointing, AttentionImplementation]] = [
    ((1, 4), "none", "sdpa"),
    ((4, 64), "none", "naive"),
    ((4, 64), "full", "sdpa"),
]
PEAKS = [
    Case(shape=shape, batch=batch, checkpointing=checkpointing, attention=attention)
    for shape in SHAPES.values()
    for batch, checkpointing, attention in RUNS
]


@pytest.mark.parametrize("case", PEAKS, ids=str)
def test_the_peak_is_that_of_the_allocations(case: Case) -> None:
    measured = _Pass(case).peak()
    if case.shape.d_ff >= case.shape.d_model:
        assert case.peak == measured
    else:
        # The peak may then be in attention, whose kernel's scratch memory is not counted.
        assert case.peak == pytest.approx(measured, rel=0.05)


RUNS_IN_16_BITS: list[tuple[str, Checkpointing, AttentionImplementation]] = [
    ("bfloat16", "none", "sdpa"),
    ("bfloat16", "full", "naive"),
    ("bfloat16 weights", "full", "sdpa"),
    ("float16", "none", "naive"),
]
PEAKS_IN_16_BITS = [
    Case(
        shape=SHAPES[name],
        batch=(4, 64),
        checkpointing=checkpointing,
        attention=attention,
        precision=precision,
    )
    for name in ("plain", "large vocabulary, tied")
    for precision, checkpointing, attention in RUNS_IN_16_BITS
]


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("without_scratch")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("case", PEAKS_IN_16_BITS, ids=str)
def test_the_peak_in_16_bits(case: Case) -> None:
    assert case.peak == pytest.approx(_Pass(case).peak(), rel=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case(shape=SHAPES["large vocabulary, tied"], batch=(4, 64), precision="bfloat16"),
        Case(
            shape=dataclasses.replace(SHAPES["plain"], num_layers=8),
            batch=(4, 128),
            precision="bfloat16",
        ),
        Case(
            shape=dataclasses.replace(SHAPES["plain"], vocab_size=4000),
            batch=(4, 64),
            attention="naive",
            precision="bfloat16",
            checkpointing="full",
        ),
    ],
    ids=str,
)
def test_the_peak_with_scratch_memory_is_close(case: Case) -> None:
    assert case.peak == pytest.approx(_Pass(case).peak(), rel=0.05)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "large vocabulary, tied"])
@pytest.mark.usefixtures("without_scratch")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_gradients_that_stay_where_they_were_made_add_to_the_peak(
    name: str, precision: str
) -> None:
    # With few tokens, the peak occurs when the weight gradients are almost complete.
    for batch in ((1, 4), (4, 64)):
        case = Case(shape=SHAPES[name], batch=batch, precision=precision)
        run = _Pass(case)
        peak = peak_allocations({"step": run.forward_and_backward})["step"]
        predicted = peak_activation_bytes(
            *case.saved_arguments(), precision=PRECISIONS[precision], keeps_gradients=True
        )
        assert predicted == peak


def test_a_shape_that_cannot_run_saves_nothing_that_is_known() -> None:
    batch = BatchShape(num_sequences=1, context_length=1)
    with pytest.raises(ShapeError, match="cannot build"):
        saved_for_backward_bytes(model_preset("gpt3-175B"), batch)


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        (Precision(compute="bfloat16"), "only under autocast"),
        (Precision(parameters="float64", compute="float64"), "float64 are not accounted for"),
        (Precision(parameters="bfloat16", compute="float16", autocast=True), "autocast over"),
    ],
)
def test_formats_that_run_otherwise_are_refused(precision: Precision, reason: str) -> None:
    batch = BatchShape(num_sequences=1, context_length=1)
    with pytest.raises(UsageError, match=reason):
        saved_for_backward_bytes(_SMALL, batch, precision=precision)
