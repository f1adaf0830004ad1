"""Tests that memory and step time of a million layouts take seconds on one core, without torch."""

import os
import subprocess
import sys

import pytest

_MILLION = """
import sys, time
import numpy as np
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import layout_memory
from paceline.predict.cost.cluster import Tier, Tiers
from paceline.predict.cost.step_time import Cluster, step_time
from paceline.core import ModelShape, Precision

size = 10**6
generator = np.random.default_rng(0)

def draw(low, high):
    return generator.integers(low, high + 1, size)

layouts = Layouts(
    replicate=draw(1, 64), shard=draw(1, 64), tensor=2 ** draw(0, 3), context=draw(1, 4),
    pipeline=draw(1, 16), pipeline_interleave=draw(1, 4), stage=draw(0, 3),
    sequence_parallel=draw(0, 1).astype(bool), checkpointing=draw(0, 2),
)
workload = Workload(
    shape=ModelShape(
        vocab_size=128_256, d_model=8192, d_ff=28_672, num_layers=80, num_heads=64, num_kv_heads=8
    ),
    precision=Precision(compute="bfloat16", autocast=True),
    context_length=8192, micro_batch=draw(1, 4), num_micro_batches=draw(1, 64), attention="naive",
)
tiers = Tiers((
    Tier(name="host", num_devices=8, latency_s=5e-6, bytes_per_s=450e9),
    Tier(name="pod", num_devices=256, latency_s=1e-5, bytes_per_s=50e9),
    Tier(name="all", num_devices=None, latency_s=2e-5, bytes_per_s=25e9),
))
cluster = Cluster(flops_per_s=4e14, memory_bytes_per_s=2e12, tiers=tiers)
started = time.process_time()
seconds = step_time(layouts, workload, cluster).total_s
held = layout_memory(layouts, workload).total
took = time.process_time() - started
assert seconds.shape == held.shape == (size,)
assert np.isfinite(seconds).all() and (seconds > 0).all()
assert np.isfinite(held).all() and (held > 0).all()
assert "torch" not in sys.modules
print(took)
"""


@pytest.mark.slow
def test_a_million_layouts_take_seconds() -> None:
    single = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _MILLION], check=True, capture_output=True, text=True, env=single
    )
    assert float(done.stdout) < 5
