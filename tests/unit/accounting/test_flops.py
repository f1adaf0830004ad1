import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from paceline.accounting import count_parameters, flops_per_token
from paceline.core import ModelShape, model_preset
from paceline.models import TransformerLM, next_token_loss


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3), st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.integers(2, 24), st.booleans()
)
def test_the_full_convention_is_what_torch_counts(
    num_layers: int, heads: tuple[int, int], context: int, tied: bool
) -> None:
    shape = ModelShape(
        vocab_size=50,
        d_model=48,
        d_ff=80,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        tied_embeddings=tied,
    )
    model = TransformerLM(shape, attention="naive")
    tokens = torch.randint(50, (2, context))
    with FlopCounterMode(display=False) as counter:
        loss = next_token_loss(model(tokens), tokens)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    flops = flops_per_token(shape, context)
    assert flops.forward * tokens.numel() == forward
    assert flops.backward * tokens.numel() == counter.get_total_flops()


def test_the_formula_of_the_literature() -> None:
    shape = model_preset("gpt3-175B")
    parameters = count_parameters(shape)
    full = flops_per_token(shape, 2048)
    attention = 12 * shape.num_layers * shape.d_model * 2048
    assert full.model == 6 * parameters.matmul + attention
    causal = flops_per_token(shape, 2048, convention="causal")
    assert full.model - causal.model == pytest.approx(attention / 2, rel=1e-3)


def test_tying_saves_parameters_but_no_work() -> None:
    shape = model_preset("small")
    tied = dataclasses.replace(shape, tied_embeddings=True)
    assert count_parameters(shape).total - count_parameters(tied).total == 10_000 * 768
    assert flops_per_token(shape, 128) == flops_per_token(tied, 128)


def test_recomputation_counts_for_the_hardware_only() -> None:
    shape = model_preset("medium")
    none = flops_per_token(shape, 512)
    full = flops_per_token(shape, 512, activation_checkpointing="full")
    selective = flops_per_token(shape, 512, activation_checkpointing="selective")
    assert none.model == full.model == selective.model == none.hardware
    head = 2 * shape.vocab_size * shape.d_model
    assert full.recomputation == none.forward - head
    assert selective.recomputation == 4 * shape.num_layers * shape.d_model * 512


def test_seven_matrices_per_layer_and_one() -> None:
    shape = model_preset("large")
    with torch.device("meta"):
        model = TransformerLM(shape)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 7 * 36 + 1


def test_the_causal_convention_counts_the_keys_that_each_query_sees() -> None:
    shape, context = model_preset("bytes-6M"), 7
    causal = flops_per_token(shape, context, convention="causal")
    visible = sum(range(1, context + 1)) / context
    scores = 4 * shape.num_layers * shape.attention_width * visible
    assert causal.forward == 2 * count_parameters(shape).matmul + scores
    assert causal.backward == 2 * causal.forward
