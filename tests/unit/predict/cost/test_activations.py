"""Tests of kept activations against torch's saved tensors and the single-device formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.core import BatchShape, ModelShape, ParallelLayout, Precision, precision_preset
from paceline.predict.cost.activations import block_bytes_per_token, kept_activations
from paceline.predict.cost.layouts import Layouts, Workload
from tests.unit.accounting.memory.activation_cases import block_bytes

SEQUENCES, LENGTH, NUM_BLOCKS = 3, 20, 2
SHAPES = {
    "as many key heads": ModelShape(
        vocab_size=10, d_model=64, d_ff=160, num_layers=NUM_BLOCKS, num_heads=4
    ),
    "grouped key heads": ModelShape(
        vocab_size=10, d_model=96, d_ff=256, num_layers=NUM_BLOCKS, num_heads=6, num_kv_heads=2
    ),
}
BFLOAT16 = Precision(parameters="bfloat16", compute="bfloat16")


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        return exact.type_as(x) * self.weight


class _Block(nn.Module):
    """A gated block with grouped heads and float32 RMS norms, as in published models."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width, keys = shape.d_model, shape.key_value_width
        self.norms = nn.ModuleList([_Norm(width), _Norm(width)])
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, shape.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.d_ff, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        mixed = F.scaled_dot_product_attention(
            *(self._heads(part(normed)) for part in (self.query, self.key, self.value)),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        mixed = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + mixed

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.shape.head_width).transpose(1, 2)


def _workload(shape: ModelShape, precision: Precision) -> Workload:
    return Workload(
        shape=shape,
        precision=precision,
        context_length=LENGTH,
        micro_batch=SEQUENCES,
        num_micro_batches=1,
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_gated_block_keeps_what_torch_packs(name: str) -> None:
    shape = SHAPES[name]
    model = nn.Sequential(*(_Block(shape) for _ in range(NUM_BLOCKS))).to(torch.bfloat16)
    inputs = torch.randn(SEQUENCES, LENGTH, shape.d_model, dtype=torch.bfloat16)
    inputs.requires_grad_()
    others = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), inputs)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        # Keep outputs alive until counted: a freed address may be reused by another tensor.
        outputs = model(inputs)
    packed = sum(
        tensor.untyped_storage().nbytes() for at, tensor in saved.items() if at not in others
    )
    assert outputs.requires_grad
    predicted = kept_activations(Layouts.of([ParallelLayout()]), _workload(shape, BFLOAT16))
    assert predicted == [packed]
    ratio = shape.key_value_heads / shape.num_heads
    width, heads = shape.d_model, shape.num_heads
    published = 12 * width + 4 * ratio * width + 8 * shape.d_ff + 4 * heads + 8 * width + 8
    assert packed == published * SEQUENCES * LENGTH * NUM_BLOCKS


@pytest.mark.parametrize("name", SHAPES)
def test_one_device_in_float32_keeps_what_the_models_formula_says(name: str) -> None:
    shape = SHAPES[name]
    batch = BatchShape(num_sequences=SEQUENCES, context_length=LENGTH)
    kept = block_bytes_per_token(
        Layouts.of([ParallelLayout()]), _workload(shape, precision_preset("float32"))
    )
    # Paceline's model concatenates its heads in a copy, which these blocks avoid.
    joined = 4 * shape.attention_width
    assert kept * batch.tokens_per_pass == [block_bytes(shape, batch) - joined * 60]


def test_axes_divide_what_they_should() -> None:
    workload = _workload(SHAPES["as many key heads"], BFLOAT16)

    def kept(**axes: int) -> float:
        return float(kept_activations(Layouts.of([ParallelLayout(**axes)]), workload)[0])

    assert kept(context=4) == kept() / 4
    assert kept(tensor=4, sequence_parallel=True) == kept() / 4
    assert kept() / 4 < kept(tensor=4) < kept()
    assert kept(replicate=4) == kept()
    # Flash attention stores no scores, so selective recomputation saves nothing.
    selective = Layouts.of([ParallelLayout(activation_checkpointing="selective")])
    assert kept_activations(selective, workload) == [kept()]
