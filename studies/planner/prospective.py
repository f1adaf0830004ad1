"""Published runs that were added after the planner's terms, priors and intervals had been chosen.

NVIDIA/dgxc-benchmarking: grok1/README_314b.md at 143b90dd91 and 1b9bb6b3cf, grok1/README.md,
deepseek_v3/pretraining/README.md and llama4/README.md at 60d6fd33ba.
yanring/Megatron-MoE-ModelZoo: best_practice/qwen3/readme.md at e865051, the rows that state their
step time, batch and layout. Nothing is fitted to these runs. Expert tensor parallelism, which some
of them have, is not modelled.
"""

from collections.abc import Iterator
from typing import Any

from paceline.core.specs import Experts
from paceline.planner.published import PublishedModel, PublishedRun, published_models

_KIND: dict[str, Any] = {
    "feed_forward": "swiglu",
    "norm": "rmsnorm",
    "positions": "rotary",
    "biases": False,
    "tied_embeddings": False,
    "head_dim": 128,
    "num_kv_heads": 8,
}


def _grok(layers: int) -> PublishedModel:
    return PublishedModel(
        d_model=6144,
        num_layers=layers,
        num_heads=48,
        d_ff=32_768,
        vocab_size=131_072,
        experts=Experts(num_experts=8, experts_per_token=2, width=32_768),
        source="xai-org/grok-1",
        **_KIND,
    )


_MAVERICK = PublishedModel(
    d_model=5120,
    num_layers=48,
    num_heads=40,
    d_ff=16_384,
    vocab_size=202_048,
    # Every second block is dense.
    experts=Experts(
        num_experts=128,
        experts_per_token=1,
        width=8192,
        shared_width=8192,
        num_dense_layers=24,
        dense_width=16_384,
    ),
    source="meta-llama/Llama-4-Maverick-17B-128E: config.json",
    **_KIND,
)

# devices, context length, layers, tensor, pipeline, context, expert, interleave, sequences
_GROK_ON_H100 = (
    (8, 4096, 2, 4, 1, 1, 2, 1, 1024),
    (16, 4096, 4, 4, 1, 1, 4, 1, 1024),
    (32, 4096, 4, 4, 1, 1, 8, 1, 1024),
    (64, 8192, 8, 4, 1, 2, 8, 1, 1024),
    (128, 8192, 16, 4, 2, 2, 8, 8, 1024),
    (256, 8192, 32, 4, 4, 2, 8, 8, 1024),
    (512, 8192, 64, 4, 8, 2, 8, 8, 1024),
    (1024, 8192, 64, 4, 8, 2, 8, 8, 2048),
    (2048, 8192, 64, 4, 8, 2, 8, 8, 4096),
)
_GROK_SECONDS = {
    ("25.01", "bf16"): (24.03, 21.52, 10.64, 20.64, 20.64, 20.7, 20.83, 21, 21.09),
    ("25.01", "fp8"): (19.89, 17.08, 8.3, 16.21, 16.48, 16.55, 16.69, 16.89, 17.04),
    ("25.03", "bf16"): (24.00, 21.71, 10.70, 21.42, 20.73, 20.83, 21.01, 21.20, 21.29),
    ("25.03", "fp8"): (19.71, 17.80, 8.70, 17.53, 16.70, 16.75, 16.90, 17.01, 17.30),
}
_GROK_ON_GB200 = {"bf16": (7.325, 7.39, 7.324), "fp8": (5.298, 5.224, 5.193)}
_GROK_25_05 = {"bf16": 16.93, "fp8": 13.454}
_MAVERICK_ON_GB200 = {"bf16": (7.781, 7.859, 7.992), "fp8": (6.093, 6.223, 6.327)}
_MAVERICK_ON_H100 = {"bf16": 4.426, "fp8": 3.855}
_DEEPSEEK_ON_GB200 = (34.168, 34.194, 34.274)
# tensor, expert, pipeline, interleave, micro-batch, full recomputation, ZeRO stage, seconds
_QWEN3_ON_H100 = (
    (2, 32, 8, 4, 1, False, 1, 19.7),
    (2, 32, 8, 4, 1, False, 1, 17.6),
    (2, 8, 1, 1, 4, True, 3, 17.6),
    (2, 8, 32, 3, 1, False, 1, 24.2),
    (4, 8, 8, 4, 1, False, 1, 29.0),
)


def prospective_runs() -> dict[str, list[PublishedRun]]:
    """Returns the runs by source."""
    return {
        "Grok-1 on H100": list(_grok_on_h100()),
        "Grok-1 on GB200": list(_grok_on_gb200()),
        "Llama 4 Maverick": list(_maverick()),
        "DeepSeek-V3": list(_deepseek()),
        "Qwen3 235B, ModelZoo": list(_qwen3()),
    }


def _run(
    framework: str,
    device: str,
    precision: str,
    shape: PublishedModel,
    devices: int,
    seconds: float,
    **others: Any,
) -> PublishedRun:
    fields = {"tensor": 1, "pipeline": 1, "context": 1, "micro_batch": 1, "zero": 1, **others}
    data = devices // (fields["tensor"] * fields["pipeline"] * fields["context"])
    return PublishedRun(
        id=f"{shape.source} on {devices} {device}",
        source="prospective",
        framework=framework,
        model=shape.source,
        device=device,
        precision=precision,
        unit="s/iteration",
        measured=seconds,
        devices=devices,
        data=data,
        shard=data,
        sequence_parallel=fields["tensor"] > 1,
        shape=shape,
        **fields,
    )


def _grok_on_h100() -> Iterator[PublishedRun]:
    for (release, precision), times in _GROK_SECONDS.items():
        for config, seconds in zip(_GROK_ON_H100, times, strict=True):
            yield _grok_run(f"Megatron-Bridge {release}", precision, config, seconds)
    for precision, seconds in _GROK_25_05.items():
        yield _grok_run("Megatron-Bridge 25.05", precision, _GROK_ON_H100[6], seconds)


def _grok_run(
    framework: str, precision: str, config: tuple[int, ...], seconds: float
) -> PublishedRun:
    devices, context_length, layers, tensor, pipeline, context, expert, interleave, batch = config
    return _run(
        *(framework, "h100-sxm-80gb", precision, _grok(layers), devices, seconds),
        context_length=context_length,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        interleave=interleave,
        global_batch=batch,
    )


def _on_gb200(
    shape: PublishedModel,
    times_of: dict[str, tuple[float, ...]],
    *,
    sequences_per_device: int,
    **layout: int,
) -> Iterator[PublishedRun]:
    for precision, times in times_of.items():
        for devices, seconds in zip((128, 256, 512), times, strict=True):
            yield _run(
                *("Megatron-Bridge 25.05", "gb200", precision, shape, devices, seconds),
                context_length=8192,
                global_batch=sequences_per_device * devices,
                **layout,
            )


def _grok_on_gb200() -> Iterator[PublishedRun]:
    yield from _on_gb200(_grok(64), _GROK_ON_GB200, sequences_per_device=2, tensor=4, expert=8)


def _maverick() -> Iterator[PublishedRun]:
    layout = {"pipeline": 2, "interleave": 12, "expert": 64}
    yield from _on_gb200(_MAVERICK, _MAVERICK_ON_GB200, sequences_per_device=8, **layout)
    for precision, seconds in _MAVERICK_ON_H100.items():
        yield _run(
            *("Megatron-Bridge 25.05", "h100-sxm-80gb", precision, _MAVERICK, 512, seconds),
            context_length=8192,
            tensor=4,
            expert=128,
            global_batch=1024,
        )


def _deepseek() -> Iterator[PublishedRun]:
    model = published_models()["DeepSeekV3"]
    yield _run(
        *("Megatron-Bridge 25.05", "h100-sxm-80gb", "bf16", model, 1024, 52.04),
        context_length=4096,
        tensor=2,
        pipeline=16,
        expert=64,
        global_batch=8192,
    )
    for devices, expert, seconds in zip(
        (128, 256, 512), (32, 64, 64), _DEEPSEEK_ON_GB200, strict=True
    ):
        yield _run(
            *("Megatron-Bridge 25.05", "gb200", "bf16", model, devices, seconds),
            context_length=4096,
            tensor=2,
            pipeline=4,
            expert=expert,
            global_batch=8 * devices,
        )


def _qwen3() -> Iterator[PublishedRun]:
    model = published_models()["Qwen3_235B_a22B"]
    for tensor, expert, pipeline, interleave, micro, full, zero, seconds in _QWEN3_ON_H100:
        yield _run(
            *("Megatron-Bridge 25.09", "h100-sxm-80gb", "bf16", model, 256, seconds),
            context_length=4096,
            tensor=tensor,
            pipeline=pipeline,
            interleave=interleave,
            expert=expert,
            micro_batch=micro,
            zero=zero,
            recompute="full" if full else "selective",
            global_batch=2048,
        )
