"""Small models and clusters on which every layout can be tried one by one."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.core import ModelShape, find_device
from paceline.core.plan import ParallelLayout
from paceline.core.specs import Experts
from paceline.planner.search.spec import (
    PerformanceModel,
    SearchSpec,
    assumed_performance,
    training_precision,
)
from paceline.predict.cost.layouts import Layouts
from paceline.predict.cost.memory import layout_memory
from paceline.predict.cost.step_time import step_time

H100 = find_device("h100-sxm")
PERFORMANCE = assumed_performance(H100, "bfloat16")
SHAPE = ModelShape(
    vocab_size=1000, d_model=512, d_ff=1536, num_layers=4, num_heads=8, num_kv_heads=4
)
MIXTURE = Experts(num_experts=12, experts_per_token=2, width=384, shared_width=768)
"""Each token uses a width of 2 * 384 + 768 = 1536, the `d_ff` of `SHAPE`."""


def spec(**changes: Any) -> SearchSpec:
    values: dict[str, Any] = {
        "shape": SHAPE,
        "precision": training_precision("bfloat16"),
        "context_length": 64,
        "global_batch": 16,
        "num_devices": 8,
        "memory_bytes": 1e9,
        "devices_per_host": 4,
    }
    return SearchSpec(**values | changes)


def oracle(
    asked: SearchSpec, performance: PerformanceModel = PERFORMANCE
) -> Iterator[tuple[float, float, Any]]:
    """Yields time, memory and layout of every layout that divides evenly, by brute force."""
    shape, sizes = asked.shape, range(1, asked.num_devices + 1)
    for tensor, context, pipeline, replicate, shard in itertools.product(sizes, repeat=5):
        data = replicate * shard
        used = tensor * context * pipeline * data
        least = asked.least_used * asked.num_devices
        host = min(asked.devices_per_host, asked.num_devices)
        if not least <= used <= asked.num_devices or used % host or asked.global_batch % data:
            continue
        widths: tuple[int, ...] = (shape.d_ff,)
        if asked.experts is not None:
            widths = (asked.experts.shared_width, asked.experts.dense_width)
        if any(number % tensor for number in (shape.num_heads, shape.key_value_heads, *widths)):
            continue
        if context > 1 and asked.context_length % (2 * context):
            continue
        for passes, interleave, stage, stream, checkpointing, expert in itertools.product(
            *(range(1, asked.global_batch // data + 1), range(1, 4), range(4), (False, True)),
            *(range(3), range(1, tensor * context * data + 1)),
        ):
            layers = (shape.num_layers, shape.num_layers + 2)
            if asked.global_batch // data % passes or (stage > 0) != (shard > 1):
                continue
            if all(number % pipeline for number in layers) or pipeline > shape.num_layers:
                continue
            if interleave > 1 and (
                pipeline == 1
                or passes % pipeline
                or all(number % (pipeline * interleave) for number in layers)
            ):
                continue
            if stream and (tensor == 1 or asked.context_length // context % tensor):
                continue
            if asked.experts is None:
                if expert > 1:
                    continue
            elif (
                asked.experts.num_experts % expert
                or tensor * context * (shard if stage else data) % expert
                or stream != (tensor > 1)
            ):
                continue
            layout = ParallelLayout(
                replicate=replicate,
                shard=shard,
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                expert=expert,
                pipeline_interleave=interleave,
                sharding=("none", "optimizer", "gradients", "parameters")[stage],  # type: ignore[arg-type]
                sequence_parallel=stream,
                activation_checkpointing=("none", "selective", "full")[checkpointing],  # type: ignore[arg-type]
            )
            micro_batch = asked.global_batch // data // passes
            workload = asked.workload(np.array([micro_batch]), np.array([passes]))
            layouts = Layouts.of([layout])
            seconds = step_time(
                layouts, workload, performance.cluster, hidden=performance.hidden
            ).total_s
            memory = layout_memory(layouts, workload).total
            yield float(np.ravel(seconds)[0]), float(np.ravel(memory)[0]), layout


def with_memory(asked: SearchSpec, memory_bytes: float) -> SearchSpec:
    return dataclasses.replace(asked, memory_bytes=memory_bytes)
