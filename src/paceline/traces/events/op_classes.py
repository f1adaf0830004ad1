"""Derives an operator's kind of work and FLOPs from its name and input shapes."""

import enum
import math
import re

import msgspec


class OpClass(enum.StrEnum):
    """Kinds of work, as shown in tables."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    SOFTMAX = "softmax"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    INDEXING = "indexing"
    COPY = "copy"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    OTHER = "other"


# The first pattern found in the lower-case name wins: torch operators, then kernels.
_PATTERNS: tuple[tuple[OpClass, str], ...] = (
    (
        OpClass.COMMUNICATION,
        r"^(nccl|rccl|gloo:|_?c10d(_functional)?::|record_param_comms|ncclkernel|mpi:)",
    ),
    (OpClass.OPTIMIZER, r"adam|sgd_|multi_tensor_apply|optimizer\.step|lamb_|muon"),
    (
        OpClass.ATTENTION,
        r"scaled_dot_product|flash_(fwd|bwd|attn|attention)|fmha|attn_(fwd|bwd)"
        r"|^paceline::attention|^attention_\w+_kernel",
    ),
    (OpClass.SOFTMAX, r"softmax"),
    (
        OpClass.MATMUL,
        r"aten::(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|einsum|dot|mv|_int_mm|_scaled_mm)\b"
        r"|gemm|gemv|cutlass|xmma|cublas|wgmma|nvjet|mkldnn_linear",
    ),
    (OpClass.INDEXING, r"index|embedding|gather|scatter|masked_fill|where|nll_loss|one_hot"),
    (
        OpClass.REDUCTION,
        r"aten::(sum|mean|amax|amin|max|min|norm|linalg_vector_norm|logsumexp|var|all|any|cumsum"
        r"|native_layer_norm\w*|_fused_rms_norm\w*|rms_norm|layer_norm)\b|reduce|rms_?norm"
        r"|layer_?norm",
    ),
    (
        OpClass.COPY,
        r"memcpy|memset|aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|fill_|zero_|zeros"
        r"|zeros_like|ones_like|ones|arange)\b|catarray|copy_kernel",
    ),
    (
        OpClass.ELEMENTWISE,
        r"aten::(add|sub|mul|div|neg|exp|exp2|log|sqrt|rsqrt|pow|silu|gelu|sigmoid|tanh|relu"
        r"|silu_backward|gelu_backward|threshold_backward|sigmoid_backward|cos|sin|rsub|reciprocal"
        r"|clamp|addcmul|addcdiv|lerp|dropout|native_dropout|bitwise_\w+|eq|ne|lt|gt|le|ge|tril"
        r"|triu|isnan|abs|maximum|minimum|_foreach_\w+)_?\b|elementwise|vectorized",
    ),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)


def op_class_of(name: str) -> OpClass:
    """Returns the kind of work of an operator or kernel."""
    lower = name.lower()
    return next((kind for kind, pattern in _COMPILED if pattern.search(lower)), OpClass.OTHER)


def matmul_flops(name: str, input_dims: bytes) -> int:
    """Returns the FLOPs of a matmul operator, 2 per multiply-add; 0 for other operators.

    `input_dims` is the profiler's JSON list of input shapes.
    """
    if name not in _MATMULS or not input_dims:
        return 0
    left, right, outputs, count = _MATMULS[name]
    try:
        shapes = msgspec.json.decode(input_dims, type=list[list[int]])
        flops = count * 2 * math.prod(shapes[left]) * shapes[right][outputs]
    except (msgspec.DecodeError, IndexError, RecursionError):
        return 0
    # Ignore impossible shapes, as in a damaged trace.
    return flops if 0 <= flops < _MAX_FLOPS else 0


_MAX_FLOPS = 10**18  # One second of the largest existing machines.

# Indices of the two factors among an operator's inputs, the dimension of the second one that the
# result inherits, and the number of such matmuls. Attention has matmuls of (length x length x
# width) per head: two in forward, five in backward, of which one is recomputed.
_MATMULS = {
    "aten::mm": (0, 1, -1, 1),
    "aten::bmm": (0, 1, -1, 1),
    "aten::addmm": (1, 2, -1, 1),
    "aten::baddbmm": (1, 2, -1, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 1, -2, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 2, -2, 5),
}
