"""The self-test of the Triton kernels: a comparison with SDPA on a device, and its record.

Triton's interpreter shows that the kernels' arithmetic is right, but neither races on a GPU nor
speed. SDPA is therefore the default on CUDA. `paceline env --self-test` compares both on the user's
own device, and where Triton is right and faster in every case, later processes prefer it. A result
holds for one device, torch and Triton, and for the sources of the kernels and of this test.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.units import format_seconds
from paceline.kernels.attention.layout import default_scale
from paceline.kernels.attention.op import attention_op
from paceline.kernels.attention.triton.tile_sizes import searches_tilings
from paceline.kernels.attention.user_cache import UserCache

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Computes attention of query, key and value; the last argument says whether it is causal."""
TestedDType = Literal["float32", "bfloat16", "float16"]

TOLERANCES: dict[TestedDType, float] = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}
"""The largest relative error of a right result, over any block of positions.

Between right and wrong results there is room: on a CPU, with 512 to 2,048 tokens and heads of 64,
80 and 256, SDPA, tiled and naive attention differ by at most 1.3e-6 in float32, 1.4e-2 in bfloat16
and 1.4e-3 in float16; naive attention, which rounds its scores, is the farthest. Rounding float32
inputs to TF32 makes a difference of 4e-4, and one wrong position in a block of 32 about 0.2.
"""
_TIMED_DTYPES: tuple[TestedDType, ...] = ("float32", "bfloat16")
_POSITIONS_PER_BLOCK = 32
_NUM_ROUNDS = 10
_UNTESTED = "the Triton kernels have not been tested on this device; run `paceline env --self-test`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Tensors to attend over; by default large enough that launching a kernel takes no time."""

    dtype: TestedDType
    head_dim: int
    causal: bool
    batch: int = 2
    num_heads: int = 16
    num_kv_heads: int = 16
    length: int = 4096
    is_timed: bool = True

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.dtype}, {self.length:,} tokens, heads of {self.head_dim}, {mask}"

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns query, key, value and the output's gradient, in a model's memory layout."""
        generator = torch.Generator(device).manual_seed(0)

        def tensor(num_heads: int) -> Tensor:
            size = (self.batch, self.length, num_heads, self.head_dim)
            drawn = torch.randn(size, device=device, generator=generator)
            return drawn.to(getattr(torch, self.dtype)).transpose(1, 2)

        of_query, of_key = self.num_heads, self.num_kv_heads
        return tensor(of_query), tensor(of_key), tensor(of_key), tensor(of_query)


CASES = (
    # Every row of the table of tilings; float16 has those of bfloat16.
    *(
        Case(dtype=dtype, head_dim=head_dim, causal=causal)
        for dtype, head_dim, causal in itertools.product(
            _TIMED_DTYPES, (64, 128, 256), (True, False)
        )
    ),
    # What needs every mask of the kernels: ragged lengths, padded heads, and query heads that share
    # a key head. SDPA has no fused kernel for some of this, so its time would say little.
    *(
        Case(dtype=dtype, head_dim=80, causal=causal, num_kv_heads=4, length=1000, is_timed=False)
        for dtype, causal in itertools.product(TOLERANCES, (True, False))
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Numbers and times of one case."""

    case: Case
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    """Relative errors of the output and of the gradients, against SDPA."""
    failure: str | None = None
    """Why there are no numbers to compare, if there are none."""
    time_s: float | None = None
    """Median time of forward and backward; None if it was not measured."""
    sdpa_time_s: float | None = None
    """The same of SDPA."""

    @property
    def fault(self) -> str | None:
        """What is wrong with the results; None if they are right."""
        tolerance = TOLERANCES[self.case.dtype]
        for name, error in self.errors.items():
            if error > tolerance:
                return f"{name} differs by {error:.1e}, more than {tolerance:.0e}"
        return self.failure


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTest:
    """A comparison of the Triton kernels with SDPA on one device."""

    setting: str
    """The device and the versions that the result holds for."""
    cases: tuple[CaseResult, ...]

    @property
    def objection(self) -> str | None:
        """Why SDPA is preferred; None if the kernels are right and faster in every case."""
        for result in self.cases:
            if result.fault is not None:
                return (
                    "the self-test found the Triton kernels wrong on this device "
                    f"({result.case}: {result.fault})"
                )
        timed = [
            (result.case, result.time_s, result.sdpa_time_s)
            for result in self.cases
            if result.time_s is not None and result.sdpa_time_s is not None
        ]
        for case, time_s, sdpa_time_s in timed:
            if time_s >= sdpa_time_s:
                return (
                    "the self-test found the Triton kernels no faster than SDPA on this device "
                    f"({case}: {format_seconds(time_s)} against {format_seconds(sdpa_time_s)})"
                )
        return None if timed else _UNTESTED


RESULTS = UserCache("attention-self-test.json", SelfTest)
"""The self-tests of this user's devices, by setting."""


def run_self_test(device: torch.device) -> SelfTest:
    """Compares the Triton kernels with SDPA on a CUDA device, and records the result."""
    setting = setting_of(device)
    result = SelfTest(setting=setting, cases=compare(device, CASES, triton_attention))
    with RESULTS.locked():
        RESULTS.add(setting, result)
    objection_to_triton.cache_clear()
    return result


@functools.cache  # Called in every layer of every step.
def objection_to_triton(device: torch.device) -> str | None:
    """Returns why SDPA is preferred on a CUDA device; None if Triton is known to be better."""
    if not torch.cuda.is_available():
        return _UNTESTED
    result = RESULTS.read().get(setting_of(device))
    return _UNTESTED if result is None else result.objection


def setting_of(device: torch.device) -> str:
    """Returns what a result depends on: the device, torch, Triton, the kernels and this test."""
    import triton

    major, minor = torch.cuda.get_device_capability(device)
    tilings = "searched tilings" if searches_tilings() else "tilings of the table"
    return (
        f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, "
        f"torch {torch.__version__}, triton {triton.__version__}, kernels {_digest()}, {tilings}"
    )


def _digest() -> str:
    folder = pathlib.Path(__file__).parent
    sources = [pathlib.Path(__file__), *sorted((folder / "triton").glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def torch_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Computes attention with the fused kernel that torch chooses."""
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=causal, enable_gqa=is_grouped
    )


def triton_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Computes attention with the Triton kernels."""
    scale = default_scale(query, None)
    output: Tensor
    output, _ = attention_op(query, key, value, 0 if causal else None, scale, "triton")
    return output


def compare(
    device: torch.device,
    cases: Sequence[Case],
    candidate: Attention,
    reference: Attention = torch_attention,
) -> tuple[CaseResult, ...]:
    """Compares results and times of two implementations, case by case."""
    results: list[CaseResult] = []
    for case in cases:
        results.append(_compare_case(case, device, candidate, reference))
        if results[-1].failure is not None:
            break  # After a fault, a process can do nothing more on a GPU.
    return tuple(results)


def _compare_case(
    case: Case, device: torch.device, candidate: Attention, reference: Attention
) -> CaseResult:
    inputs = case.draw(device)
    expected = _both_passes(reference, inputs, case)
    try:
        computed = _both_passes(candidate, inputs, case)
        _synchronize(device)
    except Exception as error:  # Compilers, drivers and kernels fail in many ways.
        return CaseResult(case=case, failure=f"{type(error).__name__}: {error}")
    errors = {name: _relative_error(computed[name], expected[name]) for name in expected}
    if not all(map(math.isfinite, errors.values())):
        return CaseResult(case=case, failure="some results are not finite")
    result = CaseResult(case=case, errors=errors)
    if result.fault is not None or not case.is_timed:
        return result
    # In turn, so that a device that slows down as it warms up does so for both.
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_NUM_ROUNDS):
        for attention, samples in zip((candidate, reference), times, strict=True):
            _synchronize(device)
            began = time.perf_counter()
            _both_passes(attention, inputs, case)
            _synchronize(device)
            samples.append(time.perf_counter() - began)
    time_s, sdpa_time_s = map(statistics.median, times)
    return dataclasses.replace(result, time_s=time_s, sdpa_time_s=sdpa_time_s)


def _both_passes(
    attention: Attention, inputs: tuple[Tensor, Tensor, Tensor, Tensor], case: Case
) -> dict[str, Tensor]:
    """Returns the output and the gradients, by name."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    output = attention(query, key, value, case.causal)
    gradients = torch.autograd.grad(output, (query, key, value), inputs[3])
    return dict(zip(("output", "dq", "dk", "dv"), (output.detach(), *gradients), strict=True))


def _relative_error(computed: Tensor, expected: Tensor) -> float:
    """Returns the largest ratio, over blocks of positions, of the difference to the expected.

    Under a causal mask later positions average over more keys and are smaller by far: relative to
    the largest number of a tensor, no error in them would be seen. Single positions may be zero.
    """

    def norms(tensor: Tensor) -> Tensor:
        blocks = torch.split(tensor.float(), _POSITIONS_PER_BLOCK, dim=2)
        return torch.stack([torch.linalg.matrix_norm(block) for block in blocks])

    ratios = norms(computed.float() - expected.float()) / norms(expected)
    return float(ratios.max())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
