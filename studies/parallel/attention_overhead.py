"""Measures the overhead of `flash_attention` over torch's own attention on a CPU.

The case is causal attention of one sequence, 8 heads of 64, float32. The calls of both alternate in
one process on the same inputs, so that other load on the machine affects both. Appends one
`comparison` record per length and phase to the store. First, the backend that `flash_attention`
chooses is compared with torch's `scaled_dot_product_attention`, in forward and in forward with
backward. Then the tiled backend is compared with the same, in forward with backward.

    python -m studies.parallel.attention_overhead results/attention-overhead.jsonl
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.core.specs import Phase
from paceline.kernels import flash_attention
from paceline.kernels.attention.api import AttentionBackend
from studies.harness.records import machine_case, record_comparison
from studies.harness.study import study_parser
from studies.harness.turns import interleaved, timed

HEADS, HEAD_DIM = 8, 64
# About half a minute each, forward and backward, on two cores.
ROUNDS = {1024: 400, 2048: 120, 4096: 40}
WARMUP = 2

Way = Callable[[], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A backend to compare with torch's attention."""

    backend: AttentionBackend
    subject: str
    phase: Phase
    length: int


def comparisons() -> Iterator[Comparison]:
    """Yields the comparisons: first of the default backend, then of the tiled one."""
    for length in ROUNDS:
        for phase in ("forward", "forward-backward"):
            yield Comparison(backend="auto", subject="flash_attention", phase=phase, length=length)
    for length in (1024, 4096):
        yield Comparison(
            backend="tiled",
            subject="flash_attention, tiled",
            phase="forward-backward",
            length=length,
        )


def both_ways(comparison: Comparison) -> dict[str, Callable[[], float]]:
    """Returns one timed call of ours and one of torch's, on the same inputs."""
    torch.manual_seed(0)
    size = (1, HEADS, comparison.length, HEAD_DIM)
    inputs = [torch.randn(size, requires_grad=True) for _ in range(3)]
    output_gradient = torch.randn(size)
    query, key, value = inputs

    def ours() -> Tensor:
        return flash_attention(query, key, value, causal=True, backend=comparison.backend)

    def bare() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def with_backward(attend: Callable[[], Tensor]) -> Way:
        return lambda: torch.autograd.grad(attend(), inputs, output_gradient)

    def without_gradients(attend: Callable[[], Tensor]) -> Way:
        return torch.no_grad()(attend)

    torch.testing.assert_close(ours(), bare(), atol=1e-5, rtol=1e-5)
    wrap = without_gradients if comparison.phase == "forward" else with_backward
    return {"ours": timed(wrap(ours)), "bare": timed(wrap(bare))}


def main() -> int:
    """Measures, prints and records the ratios."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, help="of every comparison; by default by length")
    arguments = parser.parse_args()
    for comparison in comparisons():
        rounds = arguments.rounds or ROUNDS[comparison.length]
        # Otherwise torch could silently choose another kernel than the fused one.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            seconds = interleaved(both_ways(comparison), rounds, warmup=WARMUP)
        case = {
            "subject": comparison.subject,
            "baseline": "scaled_dot_product_attention, fused",
            "operation": f"causal attention, {HEADS} heads of {HEAD_DIM}, float32",
            "batch": 1,
            "context": comparison.length,
            "phase": comparison.phase,
            **machine_case(),
            "warmup": WARMUP,
        }
        record_comparison(arguments.store, case, seconds["ours"], seconds["bare"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
