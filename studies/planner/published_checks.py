"""Consistency checks of published rows: axes against devices, batches, rates against FLOPs.

Each check returns a description of the contradiction it finds. The marks of a row are the results
of all checks. FLOPs per token are counted as sources count them: 6 per weight of the blocks and the
output layer, plus 12 h s per layer for attention, or half of that if only the causal half counts.
Sources round, count recomputation or omit the output layer, so a rate is marked only if it is off
by more than `RATE_TOLERANCE`.
"""

from collections.abc import Callable

from paceline.accounting.counts import count_parameters
from paceline.core.specs import ModelShape
from paceline.planner.published import PublishedRun, model_of

RATE_TOLERANCE = 0.15


def contradictions(run: PublishedRun) -> tuple[str, ...]:
    """Returns the contradictions in a row."""
    return tuple(mark for mark in (check(run) for check in _CHECKS) if mark)


def model_flops_per_token(run: PublishedRun) -> tuple[float, float] | None:
    """Returns the FLOPs per token with causal and with full attention; None if unknown."""
    model = model_of(run)
    if model is None or run.context_length is None:
        return None
    shape = model if isinstance(model, ModelShape) else model.shape(run.context_length)
    weights = count_parameters(shape).matmul
    scores = 12 * shape.num_layers * shape.attention_width * run.context_length
    return 6 * weights + scores / 2, 6.0 * weights + scores


def _axes(run: PublishedRun) -> str:
    if run.axes_product is None or run.devices is None or run.axes_product == run.devices:
        return ""
    return f"axes multiply to {run.axes_product} devices"


def _batch(run: PublishedRun) -> str:
    if run.global_batch is None or run.micro_batch is None or run.data is None:
        return ""
    left_over = run.global_batch % (run.micro_batch * run.data)
    return "global batch is no multiple of micro-batch and data ranks" if left_over else ""


def _accumulation(run: PublishedRun) -> str:
    stated = run.also.get("grad_accum")
    if stated is None or not run.global_batch or not run.micro_batch or not run.data:
        return ""
    passes = run.global_batch / (run.micro_batch * run.data)
    return "" if passes == stated else f"{stated:.0f} passes are stated for {passes:g}"


def _sequences(run: PublishedRun) -> str:
    stated = run.also.get("sequences_per_s")
    if stated is None or run.unit != "tokens/s/device" or not run.devices or not run.measured:
        return ""
    tokens = stated * (run.context_length or 0) / run.devices
    return "" if abs(tokens / run.measured - 1) < 0.01 else "sequences/s disagree with tokens/s"


def _rate(run: PublishedRun) -> str:
    stated = run.also.get("model_tflops")
    known = model_flops_per_token(run)
    if stated is None or known is None or run.step_s is None:
        return ""
    tokens_per_s = (run.tokens_per_step or 0) / run.step_s / (run.devices or 1)
    causal, full = (tokens_per_s * flops / 1e12 for flops in known)
    within = causal * (1 - RATE_TOLERANCE) <= stated <= full * (1 + RATE_TOLERANCE)
    return "" if within else "TFLOP/s disagree with the tokens/s"


_CHECKS: tuple[Callable[[PublishedRun], str], ...] = (
    _axes,
    _batch,
    _accumulation,
    _sequences,
    _rate,
)
