import dataclasses
import math
import subprocess
import sys
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.accounting import count_parameters
from paceline.core import ModelShape, model_preset
from paceline.core.errors import ShapeError
from paceline.core.presets import preset_names
from paceline.models import TransformerLM, next_token_loss
from tests.oracle import oracle_logits

SHAPE = ModelShape(
    vocab_size=97, d_model=64, d_ff=160, num_layers=3, num_heads=4, max_context_length=64
)
BUILDABLE = [
    name for name in preset_names() if name != "xxl" and not name.startswith(("gpt3", "megatron"))
]


def _num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", BUILDABLE)
def test_meta_device_and_accounting_agree_on_every_preset(name: str) -> None:
    with torch.device("meta"):
        model = TransformerLM(model_preset(name))
    assert _num_parameters(model) == count_parameters(model_preset(name)).total


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    num_kv_heads = draw(st.integers(1, 3))
    return ModelShape(
        vocab_size=draw(st.integers(1, 50)),
        # A stream of one or two channels can be so close to zero that the norm amplifies
        # rounding beyond any tolerance.
        d_model=draw(st.integers(8, 24)),
        d_ff=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 6)),
        max_context_length=16,
        tied_embeddings=draw(st.booleans()),
    )


@settings(max_examples=25, deadline=None)
@given(shapes())
def test_any_shape_is_counted_right_and_equals_the_oracle(shape: ModelShape) -> None:
    torch.manual_seed(0)
    model = TransformerLM(shape)
    assert _num_parameters(model) == count_parameters(shape).total
    tokens = torch.randint(shape.vocab_size, (2, 11))
    expected = oracle_logits(dict(model.state_dict()), shape, tokens)
    torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["auto", "tiled", "naive"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("context", [1, 2, 33, 64])
def test_the_output_equals_the_oracle(
    attention: Literal["auto", "tiled", "naive"], num_kv_heads: int, context: int
) -> None:
    torch.manual_seed(1)
    shape = dataclasses.replace(SHAPE, num_kv_heads=num_kv_heads)
    model = TransformerLM(shape, attention=attention)
    tokens = torch.randint(shape.vocab_size, (3, context))
    expected = oracle_logits(dict(model.state_dict()), shape, tokens)
    torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)


def test_the_gradients_equal_the_oracles() -> None:
    torch.manual_seed(2)
    model = TransformerLM(SHAPE)
    tokens = torch.randint(SHAPE.vocab_size, (2, 17))
    weights = {
        name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()
    }
    next_token_loss(oracle_logits(dict(weights), SHAPE, tokens), tokens).backward()
    next_token_loss(model(tokens), tokens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad,
            weights[name].grad,
            atol=1e-5,
            rtol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_later_tokens_change_nothing_before_them() -> None:
    torch.manual_seed(3)
    model = TransformerLM(SHAPE)
    tokens = torch.randint(SHAPE.vocab_size, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % SHAPE.vocab_size
    torch.testing.assert_close(model(tokens)[0, :12], model(changed)[0, :12])
    assert not torch.allclose(model(tokens)[0, 12:], model(changed)[0, 12:])


def test_a_memorised_batch_is_learned() -> None:
    torch.manual_seed(4)
    model = TransformerLM(SHAPE)
    tokens = torch.randint(SHAPE.vocab_size, (4, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(math.inf)
    for _ in range(150):
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("d_model", "num_layers"), [(64, 2), (64, 16), (512, 2)])
def test_the_first_loss_is_that_of_guessing(d_model: int, num_layers: int, tied: bool) -> None:
    torch.manual_seed(5)
    shape = ModelShape(
        vocab_size=1000,
        d_model=d_model,
        d_ff=4 * d_model,
        num_layers=num_layers,
        num_heads=8,
        tied_embeddings=tied,
    )
    model = TransformerLM(shape)
    tokens = torch.randint(1000, (4, 65))
    with torch.no_grad():
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).item()
    assert abs(loss - math.log(1000)) < 0.35


def test_the_stream_keeps_its_scale_with_depth() -> None:
    torch.manual_seed(6)
    scales = []
    for num_layers in (2, 24):
        model = TransformerLM(dataclasses.replace(SHAPE, num_layers=num_layers))
        captured: list[torch.Tensor] = []
        model.final_norm.register_forward_pre_hook(
            lambda _module, arguments, captured=captured: captured.append(arguments[0])
        )
        with torch.no_grad():
            model(torch.randint(SHAPE.vocab_size, (2, 32)))
        scales.append(captured[0].square().mean().sqrt().item())
    assert scales[1] == pytest.approx(scales[0], rel=0.5)


def test_tied_weights_are_one_parameter() -> None:
    model = TransformerLM(dataclasses.replace(SHAPE, tied_embeddings=True))
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_checkpointing_changes_memory_but_no_number() -> None:
    tokens = torch.randint(SHAPE.vocab_size, (2, 33))
    gradients, saved = [], []
    for checkpointing in ("none", "full"):
        torch.manual_seed(7)
        model = TransformerLM(SHAPE, activation_checkpointing=checkpointing)
        kept: list[int] = []

        def pack(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        saved.append(sum(kept))
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=0, rtol=0)
    assert saved[1] < saved[0] / 2


def test_norms_and_softmax_survive_sixteen_bits() -> None:
    torch.manual_seed(8)
    model = TransformerLM(SHAPE).to(torch.bfloat16)
    assert model.positions.cosine.dtype == model.positions.sine.dtype == torch.float32
    assert torch.equal(model.positions.cosine, TransformerLM(SHAPE).positions.cosine)
    tokens = torch.randint(SHAPE.vocab_size, (2, 32))
    logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert next_token_loss(logits, tokens).dtype == torch.float32
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    expected = oracle_logits(weights, SHAPE, tokens)
    assert (logits.double() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_can_be_made_on_meta_and_filled_later(tied: bool) -> None:
    shape = dataclasses.replace(SHAPE, tied_embeddings=tied)
    with torch.device("meta"):
        model = TransformerLM(shape)
    model = model.to_empty(device="cpu")
    torch.manual_seed(9)
    model.reset_parameters()
    direct = TransformerLM(shape)
    torch.manual_seed(9)
    direct.reset_parameters()
    assert _num_parameters(model) == count_parameters(shape).total
    for name, weight in direct.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    tokens = torch.randint(shape.vocab_size, (1, 8))
    assert torch.equal(model(tokens), direct(tokens))


# Runs in a separate process: the run-time shape checks of this suite cannot be compiled.
COMPILED_BLOCKS = """
import torch
from paceline.core import ModelShape
from paceline.models import TransformerLM, next_token_loss

shape = ModelShape(vocab_size=97, d_model=64, d_ff=160, num_layers=2, num_heads=4)
torch.manual_seed(10)
model = TransformerLM(shape)
names = list(model.state_dict())
tokens = torch.randint(shape.vocab_size, (2, 16))

def gradients():
    model.zero_grad()
    next_token_loss(model(tokens), tokens).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]

eager = gradients()
model.compile_blocks()
assert list(model.state_dict()) == names
for expected, compiled in zip(eager, gradients(), strict=True):
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-4)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
assert not torch._dynamo.utils.counters["graph_break"]
"""


@pytest.mark.slow
def test_compiled_blocks_keep_names_and_numbers() -> None:
    subprocess.run([sys.executable, "-c", COMPILED_BLOCKS], check=True)


@pytest.mark.parametrize(
    ("name", "culprit"), [("gpt3-175B", "feed_forward"), ("xxl", "feed_forward")]
)
def test_shapes_for_accounting_only_are_refused_by_name(name: str, culprit: str) -> None:
    with torch.device("meta"), pytest.raises(ShapeError, match=culprit):
        TransformerLM(model_preset(name))


def test_too_long_a_sequence_is_refused() -> None:
    model = TransformerLM(SHAPE)
    with pytest.raises(ShapeError, match=r"65 tokens is longer .* 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
