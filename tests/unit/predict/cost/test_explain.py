"""Tests that explanations use the numbers of the formulas and that their arithmetic is correct."""

import dataclasses
import re

import numpy as np
import pytest

from paceline.core import ModelShape, ParallelLayout, UsageError, precision_preset
from paceline.core.units import GIB, KIB, MIB, TIB
from paceline.predict.cost.cluster import Tier, Tiers
from paceline.predict.cost.explain import explain_layout
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import layout_memory
from paceline.predict.cost.step_time import Cluster, step_time

CLUSTER = Cluster(
    flops_per_s=1.5e14,
    memory_bytes_per_s=2e12,
    tiers=Tiers(
        (
            Tier(name="host", num_devices=8, latency_s=5e-6, bytes_per_s=2.4e11),
            Tier(name="network", num_devices=None, latency_s=2e-5, bytes_per_s=1e10),
        )
    ),
    launch_s=1e-6,
)
WORKLOAD = Workload(
    shape=ModelShape(vocab_size=32_000, d_model=4096, d_ff=11_008, num_layers=48, num_heads=32),
    precision=precision_preset("bfloat16"),
    context_length=2048,
    micro_batch=2,
    num_micro_batches=8,
    attention="naive",
)
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(activation_checkpointing="full"),
    ParallelLayout(shard=4, sharding="optimizer", tensor=2, activation_checkpointing="selective"),
    ParallelLayout(
        replicate=2,
        shard=16,
        sharding="parameters",
        tensor=4,
        context=2,
        pipeline=5,
        pipeline_interleave=2,
        sequence_parallel=True,
    ),
]
UNITS = {
    "TiB": TIB,
    "GiB": GIB,
    "MiB": MIB,
    "KiB": KIB,
    "B": 1,
    "TFLOP/s": 1e12,
    "TB/s": 1e12,
    "s": 1,
    "ms": 1e-3,
    "µs": 1e-6,
}


def _evaluated(text: str) -> float:
    """Returns the value of a line of arithmetic, with units replaced by factors."""
    text = text.replace(",", "")
    for unit in sorted(UNITS, key=len, reverse=True):
        text = re.sub(rf"([\d.]+) {unit}(?![\w/])", rf"(\1 * {UNITS[unit]})", text)
    assert re.fullmatch(r"[\d.e+\-*/() ]+", text), text
    return float(eval(text))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_working_gives_the_result(layout: ParallelLayout) -> None:
    explanation = explain_layout(layout, WORKLOAD, CLUSTER)
    words = ("working", "data")
    checked = 0
    for step in explanation.steps:
        if step.formula.split(" =")[0] not in words:
            assert _evaluated(step.numbers) == pytest.approx(_evaluated(step.result), rel=0.01), (
                step
            )
            checked += 1
    assert checked >= 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_the_arrays(layout: ParallelLayout) -> None:
    explanation = explain_layout(layout, WORKLOAD, CLUSTER, hidden=0.5)
    layouts = Layouts.of([layout])
    memory = layout_memory(layouts, WORKLOAD)
    assert explanation.values["peak_bytes"] == pytest.approx(float(memory.total[0]))
    terms = step_time(layouts, WORKLOAD, CLUSTER, hidden=0.5)
    assert explanation.values["step_time_s"] == pytest.approx(float(terms.total_s[0]))
    assert explanation.values["tensor_s"] == pytest.approx(float(terms.tensor_s[0]))


def test_what_a_reader_sees() -> None:
    text = explain_layout(LAYOUTS[-1], WORKLOAD, CLUSTER).render()
    assert "one of 1280 devices: replicate 2, shard 16, tensor 4, context 2, pipeline 5" in text
    assert "host: 240 GB/s and 5 µs per hop" in text
    assert "gradients averaged once in a step; 100% of a pass can hide communication" in text
    every = dataclasses.replace(WORKLOAD, reduces_every_pass=True)
    assert "after every micro-batch" in explain_layout(LAYOUTS[-1], every, CLUSTER).render()
    alone = explain_layout(ParallelLayout(), WORKLOAD, CLUSTER).render()
    assert "tensor = " not in alone
    assert "data = " not in alone


def test_arrays_are_not_explained() -> None:
    many = dataclasses.replace(WORKLOAD, micro_batch=np.array([1, 2]))
    with pytest.raises(UsageError, match="one layout"):
        explain_layout(ParallelLayout(), many, CLUSTER)
