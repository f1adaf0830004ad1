"""Descriptions of kernel launches.

Every launch is first described, then run, because the same description also compiles a kernel ahead
of time for a GPU that is not present. That requires only tensors on the meta device.
"""

import dataclasses
import functools
import math
from typing import Any, cast

import torch
from torch import Tensor
from triton.compiler import ASTSource

from paceline.core.errors import UsageError
from paceline.core.specs import DType
from paceline.kernels.attention.layout import (
    BackwardInputs,
    ForwardInputs,
    Gradients,
    Results,
    empty_gradients,
    empty_lse,
    empty_output,
)
from paceline.kernels.attention.triton.backward import (
    attention_delta_kernel,
    attention_key_value_gradient_kernel,
    attention_query_gradient_kernel,
)
from paceline.kernels.attention.triton.forward import attention_forward_kernel
from paceline.kernels.attention.triton.tile_sizes import (
    Tiling,
    Tilings,
    choose_tilings,
    padded_size,
)

Arguments = dict[str, Tensor | int | float | None]

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
_AXES = ("batch", "head", "row", "dim")
_DIVISIBLE = 16  # divisor that Triton specializes on: elements of a stride, bytes of an address
_LONGEST_SIDE = 256  # longest side of any tile, in rows or head dimensions
_DELTA_TILING = Tiling(block_queries=64, block_keys=16, num_warps=4, num_stages=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """A kernel and everything needed to launch or compile it."""

    kernel: Any
    num_programs: int
    arguments: Arguments
    """Values passed at run time, by parameter."""
    constants: dict[str, int | str]
    """Values known when the kernel is compiled, by parameter."""
    tiling: Tiling
    """Division of the work among programs and warps."""

    def run(self) -> None:
        """Launches the kernel on the current device."""
        # Along the grid's first axis there may be 2^31 programs, along the others only 65,535.
        self.kernel[(self.num_programs,)](
            **self.arguments,
            **self.constants,
            num_warps=self.tiling.num_warps,
            num_stages=self.tiling.num_stages,
        )

    def source(self) -> ASTSource:
        """Returns the input of triton.compile, specialized as the launch itself would be."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = dict(self.constants)
        attributes: dict[tuple[int], list[list[str | int]]] = {}
        for parameter in self.kernel.params:
            argument = self.arguments.get(parameter.name)
            specialize = not parameter.do_not_specialize
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
            elif argument is None or (specialize and isinstance(argument, int) and argument == 1):
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = argument
            else:
                signature[parameter.name] = _type_of(argument)
                if specialize and _is_divisible(argument):
                    attributes[(parameter.num,)] = [["tt.divisibility", _DIVISIBLE]]
        return ASTSource(self.kernel, signature, constants, attributes)


def _type_of(argument: Tensor | int | float) -> str:
    if isinstance(argument, Tensor):
        return POINTERS[argument.dtype]
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def _is_divisible(argument: Tensor | int | float) -> bool:
    if isinstance(argument, Tensor):
        return argument.storage_offset() * argument.itemsize % _DIVISIBLE == 0
    return isinstance(argument, int) and argument % _DIVISIBLE == 0


def forward_launch(inputs: ForwardInputs, results: Results, tiling: Tiling) -> KernelLaunch:
    """Describes the forward kernel's launch; the scale must not be negative."""
    output, lse = results
    num_programs = _num_tiles(inputs.query, tiling.block_queries)
    return _launch(
        attention_forward_kernel, num_programs, inputs, tiling, {"lse": lse}, {"output": output}
    )


def backward_launches(
    inputs: BackwardInputs, gradients: Gradients, tilings: Tilings
) -> tuple[KernelLaunch, KernelLaunch, KernelLaunch]:
    """Describes the launches of the backward kernels, which must run in this order."""
    query, key, lse, lse_gradient = inputs.query, inputs.key, inputs.lse, inputs.lse_gradient
    query_gradient, key_gradient, value_gradient = gradients
    from_above = _strided(output_gradient=inputs.output_gradient)
    from_above |= {"lse": lse, "delta": torch.empty_like(lse)}
    of_delta = KernelLaunch(
        kernel=attention_delta_kernel,
        num_programs=_num_tiles(query, _DELTA_TILING.block_queries),
        arguments=from_above
        | _strided(output=inputs.output)
        | {
            "lse_gradient": None if lse_gradient is None else lse_gradient.contiguous(),
            "num_queries": query.shape[2],
            "num_heads": query.shape[1],
            "head_dim": query.shape[3],
        },
        constants=_query_constants(query, _DELTA_TILING),
        tiling=_DELTA_TILING,
    )
    from_above["scale"] = float(inputs.scale)
    of_key_and_value = _launch(
        attention_key_value_gradient_kernel,
        _num_tiles(key, tilings.key_value_gradient.block_keys),
        inputs,
        tilings.key_value_gradient,
        from_above,
        {"key_gradient": key_gradient, "value_gradient": value_gradient},
        IS_GROUPED=query.shape[1] != key.shape[1],
    )
    of_query = _launch(
        attention_query_gradient_kernel,
        _num_tiles(query, tilings.query_gradient.block_queries),
        inputs,
        tilings.query_gradient,
        from_above,
        {"query_gradient": query_gradient},
    )
    return of_delta, of_key_and_value, of_query


def launches_over(inputs: ForwardInputs, tilings: Tilings) -> dict[str, KernelLaunch]:
    """Describes every kernel's launch by its name, with results that are discarded.

    Used to compile or time kernels; the queries stand in for the output's gradient.
    """
    query = inputs.query
    results = empty_output(query), empty_lse(query, "triton").zero_()
    backward = BackwardInputs(
        **vars(inputs), output=results[0], lse=results[1], output_gradient=query, lse_gradient=None
    )
    gradients = empty_gradients(query, inputs.key, inputs.value)
    of_delta, of_key_and_value, of_query = backward_launches(backward, gradients, tilings)
    return {
        "forward": forward_launch(inputs, results, tilings.forward),
        "delta": of_delta,
        "key_value_gradient": of_key_and_value,
        "query_gradient": of_query,
    }


def _launch(
    kernel: Any,
    num_programs: int,
    inputs: ForwardInputs,
    tiling: Tiling,
    arguments: Arguments,
    results: dict[str, Tensor],
    **constants: int | str,
) -> KernelLaunch:
    """Describes the launch of a kernel that computes scores; such kernels share most arguments."""
    query, key, diagonal = inputs.query, inputs.key, inputs.diagonal
    num_heads, num_queries, head_dim = query.shape[1:]
    num_keys = key.shape[2]
    # From num_keys - 1 on, the diagonal hides nothing; from -num_queries down, everything.
    is_causal = diagonal is not None and diagonal < num_keys - 1
    shared_arguments = _strided(query=query, key=key, value=inputs.value, **results) | {
        "scale_log2": inputs.scale * math.log2(math.e),
        "num_queries": num_queries,
        "num_keys": num_keys,
        "diagonal": max(cast(int, diagonal), -num_queries) if is_causal else 0,
        "num_heads": num_heads,
        "group": num_heads // key.shape[1],
        "head_dim": head_dim,
    }
    shared_constants = _query_constants(query, tiling) | {
        "BLOCK_KEYS": tiling.block_keys,
        "IS_CAUSAL": is_causal,
        "EVEN_KEYS": num_keys % tiling.block_keys == 0,
        "INPUT_PRECISION": _input_precision(query.dtype),
    }
    return KernelLaunch(
        kernel=kernel,
        num_programs=num_programs,
        arguments=shared_arguments | arguments,
        constants=shared_constants | constants,
        tiling=tiling,
    )


def _query_constants(query: Tensor, tiling: Tiling) -> dict[str, int | str]:
    num_queries, head_dim = query.shape[2:]
    width = padded_size(head_dim)
    return {
        "BLOCK_QUERIES": tiling.block_queries,
        "BLOCK_HEAD_DIM": width,
        "EVEN_QUERIES": num_queries % tiling.block_queries == 0,
        "EVEN_HEAD_DIM": width == head_dim,
    }


def _strided(**tensors: Tensor) -> Arguments:
    """Returns tensors and their strides as arguments, with the names that all kernels use."""
    arguments: Arguments = {}
    for name, tensor in tensors.items():
        strides = tensor.stride()
        within_tile = zip(tensor.shape[2:], strides[2:], strict=True)
        if sum(min(size, _LONGEST_SIDE) * stride for size, stride in within_tile) >= 2**31:
            # Kernels use 32-bit offsets inside a tile; only the offset of the tile has 64 bits.
            raise UsageError(
                f"neighbouring rows of {name} lie too far apart, its strides are {strides}; "
                "make it contiguous"
            )
        arguments[name] = tensor
        for axis, stride in zip(_AXES, strides, strict=True):
            arguments[f"{name}_{axis}_stride"] = stride
    return arguments


def _num_tiles(tensor: Tensor, block: int) -> int:
    batch, heads, sequence, _ = tensor.shape
    return batch * heads * -(-sequence // block)


def _input_precision(dtype: torch.dtype) -> str:
    """Returns the precision of float32 matmuls, which follows torch's setting.

    Triton does not support tf32 on all AMD GPUs.
    """
    if dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def table_tilings(query: Tensor) -> Tilings:
    """Returns the tilings of the static table for such a tensor."""
    dtype = cast(DType, str(query.dtype).removeprefix("torch."))
    return choose_tilings(architecture_of(query.device), dtype, query.shape[-1])


@functools.cache
def architecture_of(device: torch.device) -> str:
    """Returns the name of a device in the table of tilings, such as sm90 or gfx942."""
    if device.type != "cuda":
        return "sm86"  # The interpreter accepts any architecture.
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
