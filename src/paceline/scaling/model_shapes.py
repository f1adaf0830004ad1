"""Finds the buildable model nearest to a parameter count, and plans its training run.

Widths are multiples of 64, of 256 from width 1024 and of 1024 from width 4096, so that heads of 128
can be sharded across devices. Widths below 128 are 16 and multiples of 32. The feed-forward layer
is 8/3 of the model width, in multiples of 32, 64 or 128 that fill a GPU's matmul tiles. A model has
at least two layers, because one-layer attention cannot form induction heads. Among shapes within a
few per cent of N, the one with the aspect ratio (width over depth) nearest to published models
wins; near the optimum the loss hardly depends on it. Models of a sweep come from `ladder_shape`.
"""

import dataclasses
import functools
import math

from paceline.accounting.counts import count_parameters, flops_per_token
from paceline.core.errors import UsageError
from paceline.core.specs import BatchShape, ModelShape

_NARROW = 128
_WIDE = 1024
_VERY_WIDE = 4096
# The aspect ratio (width over depth) of published models grows slowly with size: 64 for GPT-2
# small, about 100 for Llama 7B, 130 for Llama 405B.
_ASPECT_AT_BILLION = 85.0
_ASPECT_EXPONENT = 0.085
_SIZE_WEIGHT = 8.0
_MAX_WIDTH = 65_536
_LEAST_LAYERS = 2
_FINE = 256
_LEAST_RUNG_LAYERS = 3
_LEAST_HEAD = 24
_PARAMETERS_OF_A_LAYER = 12
"""Approximate number of parameters of a layer, divided by the square of the width."""
_LADDER_ASPECT = 50.0
"""Typical aspect ratio between 1M and 100M parameters; depth is insensitive to it."""
TOKENS_PER_PARAMETER = 20
"""Chinchilla's rule of thumb."""
_CLUSTER_VOCABULARY = 128_256
_LAYER_MULTIPLE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A buildable model and the run that spends the budget on it."""

    shape: ModelShape
    parameters: int
    """Exact number of parameters, embeddings included."""
    flops_per_token: float
    """Exact FLOPs per token, attention included; 6N is the approximation."""
    tokens: int
    """Tokens that spend the budget at the exact FLOPs per token, rounded to whole steps."""
    tokens_per_step: int
    num_steps: int
    flops: float
    """Exact FLOPs of the whole run."""


def nearest_shape(parameters: float, *, vocab_size: int, context_length: int) -> ModelShape:
    """Returns the shape of a TransformerLM with about `parameters` parameters."""
    aspect = _aspect(parameters)
    best: tuple[float, ModelShape] | None = None
    for width in _widths():
        tile = min(width, 32) if width < _NARROW else 64 if width < _WIDE else 128
        shape = ModelShape(
            vocab_size=vocab_size,
            d_model=width,
            d_ff=max(tile, round(8 / 3 * width / tile) * tile),
            num_layers=_LEAST_LAYERS,
            num_heads=width // tile,
            max_context_length=context_length,
        )
        least = count_parameters(shape).total
        deeper = dataclasses.replace(shape, num_layers=_LEAST_LAYERS + 1)
        per_layer = count_parameters(deeper).total - least
        if least > 2 * parameters:
            break
        more = max(0, round((parameters - least) / per_layer))
        num_layers, total = _LEAST_LAYERS + more, least + more * per_layer
        misfit = _SIZE_WEIGHT * abs(math.log(total / parameters)) + abs(
            math.log(width / num_layers / aspect)
        )
        if best is None or misfit < best[0]:
            best = misfit, dataclasses.replace(shape, num_layers=num_layers)
    if best is None:
        raise UsageError(
            f"no TransformerLM has only {parameters:.3g} parameters with a vocabulary of "
            f"{vocab_size}; use a smaller vocabulary"
        )
    return best[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """What the models of a ladder have in common; the width of each decides the rest."""

    d_ff_ratio: float = 8 / 3
    """Width of the feed-forward layer, relative to that of the model."""
    queries_per_key_value_head: int = 1
    """Query heads that share a key-value head, where a model has that many."""
    smallest: ModelShape
    """The model at the bottom, from which the others take all that width does not decide."""


def plain_ladder(*, vocab_size: int, context_length: int) -> Ladder:
    """Returns the ladder of models for a vocabulary and a context, with the usual ratios."""
    return ladder_like(
        ModelShape(
            vocab_size=vocab_size,
            d_model=_LEAST_HEAD,
            d_ff=_LEAST_HEAD,
            num_layers=_LEAST_RUNG_LAYERS,
            num_heads=1,
            max_context_length=context_length,
        )
    )


def ladder_like(
    shape: ModelShape,
    *,
    d_ff_ratio: float = Ladder.d_ff_ratio,
    queries_per_key_value_head: int = Ladder.queries_per_key_value_head,
) -> Ladder:
    """Returns the ladder of models that differ from a shape only in what width decides."""
    ladder = Ladder(
        d_ff_ratio=d_ff_ratio, queries_per_key_value_head=queries_per_key_value_head, smallest=shape
    )
    # Shapes that differ only in what width decides have the same ladder.
    return dataclasses.replace(ladder, smallest=_rung(ladder, _LEAST_HEAD))


def ladder_shape(parameters: float, ladder: Ladder) -> ModelShape:
    """Returns the nearest shape on a ladder with exactly one shape per width, starting at 24.

    Depth is a function of width, so that losses of neighbouring sizes lie on one curve: at equal
    size and FLOPs, a small model with two layers ends 3% above one with four. Width 16 is excluded
    because its loss stops falling after two million tokens.
    """
    total, best = min(_rungs(ladder), key=lambda rung: abs(math.log(rung[0] / parameters)))
    if total > 2 * parameters:
        raise UsageError(
            f"no model of a ladder has only {parameters:.3g} parameters with a vocabulary of "
            f"{ladder.smallest.vocab_size}; use a smaller vocabulary"
        )
    return best


@functools.cache
def _rungs(ladder: Ladder) -> tuple[tuple[int, ModelShape], ...]:
    """Returns all shapes with their parameter counts; cached, as a sweep looks up hundreds."""
    shapes = [_rung(ladder, width) for width in _ladder_widths()]
    return tuple((count_parameters(shape).total, shape) for shape in shapes)


def _rung(ladder: Ladder, width: int) -> ModelShape:
    aspect = _aspect(_PARAMETERS_OF_A_LAYER * width**3 / _LADDER_ASPECT)
    tile = 8 if width < _FINE else 64 if width < _WIDE else 128
    num_heads = _small_heads(width) if width < _FINE else width // tile
    return dataclasses.replace(
        ladder.smallest,
        d_model=width,
        d_ff=max(tile, round(ladder.d_ff_ratio * width / tile) * tile),
        num_layers=max(_LEAST_RUNG_LAYERS, round(width / aspect)),
        num_heads=num_heads,
        num_kv_heads=_key_value_heads(num_heads, ladder.queries_per_key_value_head),
        head_dim=None,
    )


def _key_value_heads(num_heads: int, queries: int) -> int | None:
    """Returns the most key-value heads with at least `queries` query heads each, or a single one.

    They must divide the query heads; None for as many.
    """
    if queries == 1:
        return None
    most = max(1, num_heads // queries)
    return max(count for count in range(1, most + 1) if num_heads % count == 0)


def _small_heads(width: int) -> int:
    """Returns the largest number of heads of width >= 24; RoPE requires an even head width."""
    wanted = max(1, width // _LEAST_HEAD)
    return max(n for n in range(1, wanted + 1) if width % n == 0 and width // n % 2 == 0)


def cluster_shape(parameters: float, context_length: int) -> ModelShape:
    """Returns the nearest shape for a cluster, with the vocabulary of Llama 3.

    The number of layers is a multiple of four, so that pipelines can split them. The model uses
    grouped-query attention with at most 8 key-value heads, as Llama 3 does.
    """
    shape = nearest_shape(parameters, vocab_size=_CLUSTER_VOCABULARY, context_length=context_length)
    grouped = dataclasses.replace(shape, num_kv_heads=math.gcd(8, shape.num_heads))
    total = count_parameters(grouped).total
    more = count_parameters(dataclasses.replace(grouped, num_layers=shape.num_layers + 1)).total
    # Grouped-query attention makes a layer smaller, so more layers are needed to reach N.
    layers = shape.num_layers + (parameters - total) / (more - total)
    layers = max(1, round(layers / _LAYER_MULTIPLE)) * _LAYER_MULTIPLE
    return dataclasses.replace(grouped, num_layers=layers)


def rule_of_thumb_parameters(compute: float) -> float:
    """Returns the N of Chinchilla's rule of thumb: C = 6ND with D = 20N (Hoffmann et al. 2022)."""
    return math.sqrt(compute / (6 * TOKENS_PER_PARAMETER))


def plan_run(shape: ModelShape, compute: float, batch: BatchShape) -> TrainingRun:
    """Returns the run that spends `compute` exact FLOPs on a shape."""
    per_token = flops_per_token(shape, batch.context_length).model
    num_steps = max(1, round(compute / per_token / batch.tokens_per_step))
    tokens = num_steps * batch.tokens_per_step
    return TrainingRun(
        shape=shape,
        parameters=count_parameters(shape).total,
        flops_per_token=per_token,
        tokens=tokens,
        tokens_per_step=batch.tokens_per_step,
        num_steps=num_steps,
        flops=per_token * tokens,
    )


def suggested_batch_tokens(tokens: float) -> int:
    """Returns the batch size in tokens: the power of two nearest to Step Law's."""
    return int(2 ** round(math.log2(step_law_batch_tokens(tokens))))


def step_law_batch_tokens(tokens: float) -> float:
    """Returns the batch size in tokens by Step Law: 0.58 D^0.571 (arXiv 2503.04715)."""
    return float(0.58 * tokens**0.571)


def suggested_learning_rate(parameters: float, tokens: float) -> float:
    """Returns the peak learning rate by Step Law: 1.79 N^-0.713 D^0.307 (arXiv 2503.04715)."""
    return float(1.79 * parameters**-0.713 * tokens**0.307)


def _aspect(parameters: float) -> float:
    """Returns the typical aspect ratio (width over depth) of published models of this size."""
    return float(_ASPECT_AT_BILLION * (parameters / 1e9) ** _ASPECT_EXPONENT)


def _ladder_widths() -> list[int]:
    return [
        *range(_LEAST_HEAD, _NARROW, 8),
        *range(_NARROW, _FINE, 16),
        *(w for w in _widths() if w >= _FINE),
    ]


def _widths() -> list[int]:
    wide = range(_WIDE, _VERY_WIDE, 256)
    narrow = range(32, _NARROW, 32)
    return [
        16,
        *narrow,
        *range(_NARROW, _WIDE, 64),
        *wide,
        *range(_VERY_WIDE, _MAX_WIDTH + 1, 1024),
    ]
