"""Memory of layouts against the figures of Korthikanti et al. 2022."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.layout_memory import (
    Layouts,
    layout_activation_bytes,
    layout_state_bytes,
    pipeline_bubble,
)
from paceline.core.plan import ParallelLayout
from paceline.core.units import GIB

# Name: width, heads, layers, pipeline, interleave, micro-batch, and figure 1 in GiB per GPU:
# parameters and optimizer, activations, activations with sequence parallelism and selective
# recomputation.
MODELS = {
    "22B": (6144, 64, 48, 1, 1, 4, 45.56, 59.25, 9.56),
    "175B": (12288, 96, 96, 8, 3, 1, 45.56, 66.84, 12.35),
    "530B": (20480, 128, 105, 35, 3, 1, 31.64, 114.02, 23.08),
    "1T": (25600, 160, 128, 64, 1, 1, 32.96, 131.25, 26.56),
}
# Figure 7: percent of the activations without either, with sequence parallelism, selective
# recomputation, both, and full recomputation.
PERCENT = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}
VOCABULARY, CONTEXT, TENSOR = 51_200, 2048, 8


def _activations(name: str, **layout: object) -> float:
    width, heads, layers, pipeline, interleave, micro_batch, *_ = MODELS[name]
    layouts = Layouts.of(
        [
            dataclasses.replace(
                ParallelLayout(tensor=TENSOR, pipeline=pipeline, pipeline_interleave=interleave),
                **layout,  # type: ignore[arg-type]
            )
        ]
    )
    (held,) = layout_activation_bytes(
        layouts,
        d_model=width,
        num_heads=heads,
        num_layers=layers,
        context_length=CONTEXT,
        micro_batch=micro_batch,
    )
    return float(held)


@pytest.mark.parametrize("name", MODELS)
def test_published_memory_per_device(name: str) -> None:
    width, _, layers, pipeline, *_, states, plain, spared = MODELS[name]
    assert _activations(name) / GIB == pytest.approx(plain, rel=0.05)
    both = _activations(name, sequence_parallel=True, activation_checkpointing="selective")
    assert both / GIB == pytest.approx(spared, rel=0.05)
    num_parameters = 12 * layers * width**2 + VOCABULARY * width
    held = layout_state_bytes(
        Layouts.of([ParallelLayout(tensor=TENSOR, pipeline=pipeline)]),
        num_parameters=num_parameters,
        parameters_per_layer=12 * width**2,
        parameter_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
    )
    assert held.total / GIB == pytest.approx([states], rel=0.05)


@pytest.mark.parametrize("name", PERCENT)
def test_published_shares(name: str) -> None:
    plain = _activations(name)
    spared = (
        _activations(name, sequence_parallel=True),
        _activations(name, activation_checkpointing="selective"),
        _activations(name, sequence_parallel=True, activation_checkpointing="selective"),
        _activations(name, activation_checkpointing="full"),
    )
    assert [100 * held / plain for held in spared] == pytest.approx(PERCENT[name], rel=0.05)


@given(st.integers(1, 512), st.integers(0, 3), st.integers(1, 16), st.integers(1, 16))
def test_more_shards_never_need_more(shard: int, stage: int, tensor: int, pipeline: int) -> None:
    sharding = ("none", "optimizer", "gradients", "parameters")[stage]

    def total(ranks: int) -> float:
        layout = ParallelLayout(
            shard=ranks if stage else 1, sharding=sharding, tensor=tensor, pipeline=pipeline
        )
        held = layout_state_bytes(
            Layouts.of([layout]),
            num_parameters=10**12,
            parameters_per_layer=10**10,
            parameter_bytes=2,
            gradient_bytes=4,
            optimizer_bytes=12,
        )
        return float(np.asarray(held.parameters + held.gradients + held.optimizer_state).item())

    assert total(2 * shard) <= total(shard)
    if stage == 0:
        assert total(1) == pytest.approx(18e12 / (tensor * pipeline))


def test_the_bubble_of_a_pipeline() -> None:
    assert pipeline_bubble(8, 64) == pytest.approx(7 / 64)
    assert pipeline_bubble(8, 64, 3) == pytest.approx(7 / 192)
    assert pipeline_bubble(1, 1) == 0
