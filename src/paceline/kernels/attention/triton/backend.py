"""FlashAttention-2 on GPUs: checks the tensors, chooses tilings and launches the kernels.

By default a static table decides the tilings, so that two runs of a program launch the same
kernels. With PACELINE_AUTOTUNE=1, the first attention of its kind on a GPU times a dozen tilings
around the table's for each kernel, on its own tensors, and keeps the fastest; compiling them takes
a minute or two. The choice is written to a file in the user's cache directory and read by every
later process; deleting the file restarts the search. Of several ranks on a machine, one searches
and the others wait for it, so that all use the same tilings. Lengths are rounded up to the next
power of two: the best tiling hardly changes within that range.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from paceline.core.errors import UsageError
from paceline.kernels.attention.layout import (
    BackwardInputs,
    ForwardInputs,
    Gradients,
    Results,
    empty_gradients,
    empty_lse,
    empty_output,
)
from paceline.kernels.attention.triton.forward import attention_forward_kernel
from paceline.kernels.attention.triton.launch import (
    POINTERS,
    KernelLaunch,
    backward_launches,
    forward_launch,
    launches_over,
    table_tilings,
)
from paceline.kernels.attention.triton.tile_sizes import (
    LARGEST_HEAD_DIM,
    SMALLEST_BLOCK,
    Tiling,
    Tilings,
    padded_size,
    searches_tilings,
)
from paceline.kernels.attention.user_cache import UserCache

_LOGGER = logging.getLogger(__name__)
_MAX_SEQUENCES = 4  # Enough to fill a GPU with the tiles of a few heads; more only takes longer.

Measure = Callable[[KernelLaunch], float]

TILINGS = UserCache("attention-tilings.json", Tilings)
"""The tilings that were found, by device, Triton and tensors."""


def triton_forward(inputs: ForwardInputs, tilings: Tilings | None = None) -> Results:
    """Returns the output and the log-sum-exp of each query's scores."""
    _require_supported(inputs.query)
    tilings = tilings or _tilings_for(inputs)
    results = empty_output(inputs.query), empty_lse(inputs.query, "triton")
    if inputs.scale < 0:
        # The kernel takes the largest score before scaling, so the scale must not be negative.
        inputs = dataclasses.replace(inputs, query=-inputs.query, scale=-inputs.scale)
    _run(inputs, forward_launch(inputs, results, tilings.forward))
    return results


def triton_backward(inputs: BackwardInputs, tilings: Tilings | None = None) -> Gradients:
    """Returns the gradients of query, key and value; bitwise identical in every run."""
    _require_supported(inputs.query)
    gradients = empty_gradients(inputs.query, inputs.key, inputs.value)
    _run(inputs, *backward_launches(inputs, gradients, tilings or _tilings_for(inputs)))
    return gradients


def _run(inputs: ForwardInputs, *launches: KernelLaunch) -> None:
    """Runs kernels in this order on the inputs' device, which need not be the current one."""
    with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]
        for launch in launches:
            launch.run()


def _require_supported(query: Tensor) -> None:
    if query.dtype not in POINTERS:
        raise UsageError(
            f"the Triton attention does not take {query.dtype}; use float32, float16 or bfloat16, "
            'or backend="sdpa"'
        )
    if query.shape[-1] > LARGEST_HEAD_DIM:
        raise UsageError(
            f"the Triton attention takes heads of up to {LARGEST_HEAD_DIM} numbers, got "
            f'{query.shape[-1]}; use backend="sdpa"'
        )
    if not query.is_cuda and isinstance(attention_forward_kernel, triton.JITFunction):
        raise UsageError(
            f"the Triton attention needs a GPU, but the tensors are on {query.device}; use "
            'backend="sdpa" or "tiled", or set TRITON_INTERPRET=1 before the start to debug'
        )


def _tilings_for(inputs: ForwardInputs) -> Tilings:
    if searches_tilings():
        return tuned_tilings(inputs.query, inputs.key, causal=inputs.diagonal is not None)
    return table_tilings(inputs.query)


def tuned_tilings(query: Tensor, key: Tensor, *, causal: bool) -> Tilings:
    """Returns the fastest tilings for such tensors, from the cache or by a search."""
    return _tuned(query.device, query.dtype, _size_tried(query), _size_tried(key), causal)


def _size_tried(tensor: Tensor) -> tuple[int, int, int, int]:
    batch, heads, length, head_dim = tensor.shape
    return min(batch, _MAX_SEQUENCES), heads, padded_size(length), head_dim


@functools.cache
def _tuned(
    device: torch.device,
    dtype: torch.dtype,
    query_size: tuple[int, int, int, int],
    key_size: tuple[int, int, int, int],
    causal: bool,
) -> Tilings:
    _, num_heads, num_queries, head_dim = query_size
    _, num_kv_heads, num_keys, _ = key_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kind = (
        f"{name}, triton {triton.__version__}, {dtype}, head_dim {head_dim}, "
        f"{num_queries} x {num_keys}, heads {num_heads}/{num_kv_heads}, "
        f"{'causal' if causal else 'full'}"
    )
    with TILINGS.locked():
        found = TILINGS.read().get(kind)
        if found is not None:
            return found
        # A separate generator, so that the program's random numbers do not depend on a search.
        generator = torch.Generator(device).manual_seed(0)
        query, key = (
            torch.randn(size, device=device, generator=generator).to(dtype)
            for size in (query_size, key_size)
        )
        # Kernels are launched on the current device, which may be a different one.
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            tilings = search(query, key, causal=causal, measure=_time_on_gpu)
        TILINGS.add(kind, tilings)
    _LOGGER.info("attention tilings for %s: %s", kind, tilings)
    return tilings


def search(query: Tensor, key: Tensor, *, causal: bool, measure: Measure) -> Tilings:
    """Times the candidates of each kernel in turn and returns the fastest."""
    inputs = ForwardInputs(query, key, key, 0 if causal else None, query.shape[3] ** -0.5)
    best = table_tilings(query)
    for name in Tilings._fields:
        times: dict[Tiling, float] = {}
        for tiling in candidates(getattr(best, name)):
            try:
                launches = launches_over(inputs, best._replace(**{name: tiling}))
                times[tiling] = measure(launches[name])
            except (TritonError, RuntimeError) as error:
                # Too large for this GPU or its compiler; only an attempt shows that.
                _LOGGER.debug("%s of %s is left out: %s", tiling, name, error)
        if times:  # Otherwise the table's tiling stays.
            best = best._replace(**{name: min(times, key=lambda tiling: times[tiling])})
    return best


def candidates(start: Tiling) -> Iterator[Tiling]:
    """Yields a tiling and its neighbours: other warps or stages, a side halved or doubled."""
    for queries_factor, keys_factor in ((1, 1), (0.5, 1), (1, 0.5), (2, 1), (1, 2)):
        block_queries = int(start.block_queries * queries_factor)
        block_keys = int(start.block_keys * keys_factor)
        if min(block_queries, block_keys) >= SMALLEST_BLOCK:
            for num_warps in (4, 8):
                yield Tiling(block_queries, block_keys, num_warps, start.num_stages)
    for num_stages in (1, 2, 3):
        if num_stages != start.num_stages:
            yield dataclasses.replace(start, num_stages=num_stages)


def _time_on_gpu(launch: KernelLaunch) -> float:
    from triton.testing import do_bench

    return float(do_bench(launch.run, return_mode="median"))
