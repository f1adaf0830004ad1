"""Compiles the attention kernels ahead of time, for GPUs that need not be present.

Triton compiles ahead of time for any architecture. The result shows how many registers and how much
shared memory a kernel takes, whether registers spill to memory, and whether matmuls use the matrix
units. It does not show how fast the kernel is; a computed upper bound is recorded with it.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.accounting.attention import (
    AttentionKernel,
    find_multiprocessor,
    kernel_work,
    occupancy,
)
from paceline.benchmarks.config import Architecture, KernelCase, KernelSweep
from paceline.benchmarks.harness.isolation import IsolatedRun, run_isolated
from paceline.benchmarks.harness.measure import TORCH_DTYPES, measured
from paceline.core.errors import UsageError
from paceline.core.hardware import find_device
from paceline.core.specs import bytes_per_element
from paceline.core.units import Progress
from paceline.records import CaseValue, Record

if TYPE_CHECKING:
    from paceline.kernels.attention.triton.launch import KernelLaunch


KERNELS: tuple[AttentionKernel, ...] = ("forward", "delta", "key_value_gradient", "query_gradient")
WORK_LENGTH = 4096
"""Sequence length for which work is counted; ragged kernels are compiled for one token more."""
_TIMEOUT_S = 600.0
_NUM_KV_HEADS = 2

# By architecture: Triton's backend, its name for the target, and the threads per warp.
_TARGETS: dict[Architecture, tuple[Literal["cuda", "hip"], int | str, int]] = {
    "sm80": ("cuda", 80, 32),
    "sm86": ("cuda", 86, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# The native ones; sm90 and sm100 also support sm80's, at a fraction of the speed.
_MATRIX_INSTRUCTIONS: dict[Architecture, str] = {
    "sm80": r"\bmma\.sync\.",
    "sm86": r"\bmma\.sync\.",
    "sm90": r"\bwgmma\.mma_async\.",
    "sm100": r"\btcgen05\.mma\.",
    "gfx942": r"\bv_mfma_",
}


def kernel_records(sweep: KernelSweep, on_progress: Progress) -> Iterator[Record]:
    """Compiles every case, as many at a time as there are cores; a failure becomes a record."""
    try:
        import triton
    except ImportError:
        raise UsageError(
            "bench kernels needs Triton: pip install 'paceline[triton]' (no GPU is needed)"
        ) from None
    cases = list(sweep.cases())
    with _without_interpreter(), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for case, run in zip(cases, pool.map(_run, cases), strict=True):
            on_progress(1, 1)
            yield from _records(case, run, triton.__version__)


@contextlib.contextmanager
def _without_interpreter() -> Iterator[None]:
    """Lets child processes compile, even if TRITON_INTERPRET is set to debug kernels."""
    chosen = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if chosen is not None:
            os.environ["TRITON_INTERPRET"] = chosen


def _run(case: KernelCase) -> IsolatedRun[dict[str, dict[str, float]]]:
    return run_isolated(compile_kernels, case, memory_limit_bytes=None, timeout_s=_TIMEOUT_S)


def _records(
    case: KernelCase, run: IsolatedRun[dict[str, dict[str, float]]], version: str
) -> Iterator[Record]:
    for kernel in KERNELS:
        compiled = dict((run.result or {}).get(kernel, {}))
        blocks = {
            name: int(compiled.pop(name)) or None if compiled else None
            for name in ("block_queries", "block_keys", "num_warps", "num_stages")
        }
        fields: dict[str, CaseValue] = {
            "kernel": kernel,
            **case._asdict(),
            "triton": version,
            **blocks,
        }
        numbers = compiled and compiled | _ceiling(kernel, case, blocks, compiled)
        yield measured("kernel", fields, numbers, outcome=run.outcome, reason=run.reason)


def _ceiling(
    kernel: AttentionKernel,
    case: KernelCase,
    blocks: Mapping[str, int | None],
    compiled: Mapping[str, float],
) -> dict[str, float]:
    """Returns bounds for the compiled kernel, computed rather than measured."""
    multiprocessor = find_multiprocessor(case.architecture)
    device = find_device(multiprocessor.device)
    peak = device.peak(case.dtype).value
    work = kernel_work(
        kernel,
        length=WORK_LENGTH,
        head_dim=case.head_dim,
        element_bytes=bytes_per_element(case.dtype),
        causal=case.mask == "causal",
        block_queries=blocks["block_queries"] or WORK_LENGTH,
        block_keys=blocks["block_keys"] or WORK_LENGTH,
    )
    bandwidth = device.memory_bytes_per_s.value
    return {
        "occupancy": occupancy(
            multiprocessor,
            registers=int(compiled["registers"]),
            shared_bytes=int(compiled["shared_bytes"]),
            num_warps=blocks["num_warps"] or 1,
        ),
        **dataclasses.asdict(work),
        "best_intensity": work.best_intensity,
        "worst_intensity": work.worst_intensity,
        "worst_ceiling": min(1.0, work.worst_intensity * bandwidth / peak),
    }


def compile_kernels(case: KernelCase, _on_progress: Progress) -> dict[str, dict[str, float]]:
    """Compiles all kernels of one case in this process and returns their resource use."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(*_TARGETS[case.architecture])
    results: dict[str, dict[str, float]] = {}
    for kernel, launch in _launches(case).items():
        tiling = launch.tiling
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        compiled = triton.compile(launch.source(), target=target, options=options)
        results[kernel] = {
            "block_queries": int(launch.constants["BLOCK_QUERIES"]),
            "block_keys": int(launch.constants.get("BLOCK_KEYS", 0)),
            **options,
            **_resources(compiled.asm),
            "shared_bytes": compiled.metadata.shared,
            "matrix_instructions": _matrix_instructions(compiled.asm, case.architecture),
        }
    return results


def _launches(case: KernelCase) -> "dict[str, KernelLaunch]":
    from paceline.kernels.attention.layout import ForwardInputs
    from paceline.kernels.attention.triton.launch import launches_over
    from paceline.kernels.attention.triton.tile_sizes import choose_tilings

    length = WORK_LENGTH + (case.lengths == "ragged")

    def heads(count: int) -> torch.Tensor:
        size = (1, count, length, case.head_dim)
        return torch.empty(size, dtype=TORCH_DTYPES[case.dtype], device="meta")

    inputs = ForwardInputs(
        query=heads(_NUM_KV_HEADS * case.group),
        key=heads(_NUM_KV_HEADS),
        value=heads(_NUM_KV_HEADS),
        diagonal=0 if case.mask == "causal" else None,
        scale=case.head_dim**-0.5,
    )
    return launches_over(inputs, choose_tilings(case.architecture, case.dtype, case.head_dim))


def _resources(asm: Mapping[str, Any]) -> dict[str, float]:
    """Returns the registers of a thread, and the bytes that it spills to memory."""
    if "cubin" in asm:
        return _nvidia_resources(asm["cubin"])
    values = dict(re.findall(r"^\s+(?:- )?\.(\w+): +(\d+)$", asm["amdgcn"], re.MULTILINE))
    return {
        "registers": float(values["vgpr_count"]),
        "spill_bytes": float(values["private_segment_fixed_size"]),
    }


def _nvidia_resources(cubin: bytes) -> dict[str, float]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    values = {name: float(value) for name, value in re.findall(r"(\w+):(\d+)", printed)}
    return {"registers": values["REG"], "spill_bytes": values["STACK"] + values["LOCAL"]}


def _matrix_instructions(asm: Mapping[str, Any], architecture: Architecture) -> float:
    text = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    return len(re.findall(_MATRIX_INSTRUCTIONS[architecture], text))
