"""The courses' communication accounting for a model too large for any device, step by step.

The model is a stack of feed-forward blocks with two plain matrices each. Weights, gradients and
Adam's moments are float32; activations saved for backward are bfloat16. Where a question leaves a
convention open, the answer covers both: GB and GiB, sequential and overlapped communication.
"""

import math

from paceline.accounting.counts import count_parameters
from paceline.accounting.explanation import Explanation, WorkedLine
from paceline.accounting.overlap import (
    Communications,
    best_fsdp,
    smallest_batch_tokens,
    smallest_batch_tokens_of_any_mesh,
)
from paceline.core.errors import ShapeError
from paceline.core.specs import ModelShape
from paceline.core.units import GB, GIB

_STATE_BYTES = 16  # Per parameter: weight, gradient and two moments in float32.
_ACTIVATION_BYTES = 2
# Vendors' "G" may mean GB or GiB, so these sizes have no unit.
_H100_SIZE = 80
_TPU_SIZE = 95
_COMPUTE = 4.6e14
_BANDWIDTH = 2 * 9e10
_FSDP, _TENSOR = 16, 4
_NUM_DEVICES = _FSDP * _TENSOR
_AXES = {"fsdp_axes": 2, "tensor_axes": 1}
_EXAMPLE_TOKENS = 4096
_CONVENTIONS: tuple[tuple[Communications, str], ...] = (
    ("add", "one after the other"),
    ("overlap", "at the same time"),
)


def account(shape: ModelShape) -> tuple[Explanation, ...]:
    """Returns the answers to the four questions for a model of plain feed-forward blocks."""
    if shape.feed_forward != "linear" or shape.num_heads or shape.vocab_size:
        raise ShapeError(
            "this accounting is for models of two plain matrices per block, without attention, "
            "embedding or output layer, such as xxl"
        )
    return (_memory(shape), _sharded_memory(shape), _fixed_mesh(shape), _any_mesh(shape))


def _states_and_saved(shape: ModelShape) -> tuple[int, int]:
    """Returns the bytes of the model states, and the bytes saved per token (all matmul inputs)."""
    saved = _ACTIVATION_BYTES * shape.num_layers * (shape.d_model + shape.d_ff)
    return _STATE_BYTES * count_parameters(shape).total, saved


def _num_devices(num_bytes: float, size: float) -> tuple[int, int]:
    """Returns the number of devices needed for `num_bytes`, with `size` in GB and in GiB."""
    return math.ceil(num_bytes / (size * GB)), math.ceil(num_bytes / (size * GIB))


def _memory(shape: ModelShape) -> Explanation:
    num_parameters = count_parameters(shape).total
    states, saved = _states_and_saved(shape)
    in_gb, in_gib = _num_devices(states, _H100_SIZE)
    return Explanation(
        question="(a) Model states on one device, and activations saved for backward",
        assumptions=(
            "float32 weights, accumulated gradients and two moments: 16 bytes per parameter",
            "bfloat16 inputs of both matrices of every block are saved, in addition to the states",
        ),
        steps=(
            WorkedLine(
                formula="P = L · 2 · d_model · d_ff",
                numbers=f"{shape.num_layers} · 2 · {shape.d_model} · {shape.d_ff}",
                result=f"{num_parameters:,} parameters",
            ),
            WorkedLine(
                formula="states = 16 P",
                numbers=f"16 · {num_parameters:,}",
                result=f"{states / GB:,.1f} GB = {states / GIB:,.0f} GiB",
            ),
            WorkedLine(
                formula="saved per token = 2 L (d_model + d_ff)",
                numbers=f"2 · {shape.num_layers} · ({shape.d_model} + {shape.d_ff})",
                result=f"{saved:,} bytes",
            ),
            WorkedLine(
                formula="devices = ceil(states / 80 GiB), or of 80 GB",
                numbers=f"{states / GIB:,.1f} / 80, or {states / GB:,.1f} / 80",
                result=f"{in_gib}, or {in_gb} H100 before activations",
            ),
        ),
        values={
            "num_parameters": num_parameters,
            "state_bytes": states,
            "saved_bytes_per_token": saved,
            "devices_of_80_gib": in_gib,
            "devices_of_80_gb": in_gb,
        },
    )


def _sharded_memory(shape: ModelShape) -> Explanation:
    states, saved = _states_and_saved(shape)
    in_gb, in_gib = _num_devices(states, _TPU_SIZE)
    capacity = _TPU_SIZE * GIB
    half = saved * _EXAMPLE_TOKENS / 2
    with_tokens = math.ceil((states + half) / (capacity - half))
    most_tokens = 2 * capacity / saved
    return Explanation(
        question="(b) States and half of the activations sharded over N devices of 95 GiB",
        assumptions=(
            "A bytes are saved for backward on each device; those of every second layer are "
            "sharded",
        ),
        steps=(
            WorkedLine(
                formula="M = (16 P + A / 2) / N + A / 2",
                numbers="A -> 0, so that M = 16 P / N = 95 GiB or 95 GB",
                result=f"N = {in_gib} in GiB, {in_gb} in GB",
            ),
            WorkedLine(
                formula="N = ceil((16 P + A / 2) / (M - A / 2))",
                numbers=f"A of {_EXAMPLE_TOKENS:,} tokens = {2 * half / GB:,.1f} GB",
                result=f"N = {with_tokens}",
            ),
            WorkedLine(
                formula="A / 2 < M",
                numbers=f"tokens < 2 · {capacity / GB:,.1f} GB / {saved:,} bytes",
                result=f"{most_tokens:,.0f} tokens per device are too many for any N",
            ),
        ),
        values={
            "devices_of_95_gib": in_gib,
            "devices_of_95_gb": in_gb,
            "devices_with_4096_tokens": with_tokens,
            "most_tokens_per_device": most_tokens,
        },
    )


def _fixed_mesh(shape: ModelShape) -> Explanation:
    gamma = _COMPUTE / _BANDWIDTH
    steps = [
        WorkedLine(
            formula="gamma = C / W",
            numbers=f"{_COMPUTE:.2g} / {_BANDWIDTH:.2g}",
            result=f"{gamma:,.1f} FLOPs per byte",
        )
    ]
    values = {"gamma": gamma}
    mesh = {"fsdp": _FSDP, "tensor": _TENSOR, **_AXES}
    for communications, phrase in _CONVENTIONS:
        smallest = smallest_batch_tokens(gamma, shape.d_ff, communications=communications, **mesh)
        batch = float(smallest)
        values[f"batch_tokens_{communications}"] = batch
        joined = "+" if communications == "add" else "and also"
        steps.append(
            WorkedLine(
                formula=f"F / (Y M_X) {joined} B / (X M_Y) < B F / (N gamma), {phrase}",
                numbers=f"{shape.d_ff} / ({_TENSOR} · {_AXES['fsdp_axes']}) {joined} "
                f"B / ({_FSDP} · {_AXES['tensor_axes']}) < "
                f"B · {shape.d_ff} / ({_NUM_DEVICES} · {gamma:,.1f})",
                result=f"B > {batch:,.0f} tokens, {batch / _NUM_DEVICES:,.0f} per device",
            )
        )
    return Explanation(
        question=f"(c) Compute-bound forward on {_FSDP} by {_TENSOR} devices (FSDP by tensor)",
        assumptions=(
            "a TPU v5p: C = 4.6e14 FLOP/s, W = 2 · 9e10 bytes/s per axis; M_X = 2, M_Y = 1",
            "bfloat16 weights and activations on the wire",
        ),
        steps=tuple(steps),
        values=values,
    )


def _any_mesh(shape: ModelShape) -> Explanation:
    gamma = _COMPUTE / _BANDWIDTH
    mesh = {"num_devices": _NUM_DEVICES, **_AXES}
    steps, values = [], {}
    for communications, phrase in _CONVENTIONS:
        batch = float(
            smallest_batch_tokens_of_any_mesh(
                gamma, shape.d_ff, communications=communications, **mesh
            )
        )
        tensor = _NUM_DEVICES / float(best_fsdp(batch, shape.d_ff, **mesh))
        values[f"batch_tokens_{communications}"] = batch
        values[f"tensor_{communications}"] = tensor
        factor = "4 · " if communications == "add" else ""
        steps.append(
            WorkedLine(
                formula=f"B = {factor}N gamma² / (F M_X M_Y), {phrase}",
                numbers=f"{factor}{_NUM_DEVICES} · {gamma:,.1f}² / "
                f"({shape.d_ff} · {_AXES['fsdp_axes']} · {_AXES['tensor_axes']})",
                result=f"B > {batch:,.0f} tokens, at Y = {tensor:.1f}",
            )
        )
    return Explanation(
        question="(d) A smaller batch, still compute-bound: choose X and Y freely",
        assumptions=(
            "the split X = sqrt(B N M_X / (F M_Y)), not rounded to whole devices",
            "no pipeline stages and no all-gathers in lower precision: both would lower B further",
        ),
        steps=tuple(steps),
        values=values,
    )
