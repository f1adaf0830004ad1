"""Configuration shared by all sweeps and cases. Free of torch, for use by the command line."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, get_args

import tyro

from paceline.core.errors import UsageError
from paceline.core.presets import model_preset, preset_names, preset_spelling
from paceline.core.specs import ModelShape
from paceline.core.strategies import StrategyName, find_strategy

DeviceName = Literal["auto", "cpu", "cuda"]
PrecisionName = Literal["float32", "bfloat16", "float16"]
Compilation = Literal["none", "blocks", "whole"]


def listed(
    names: Iterable[str], parse: Callable[[str], str] = str
) -> tyro.constructors.PrimitiveConstructorSpec[str]:
    """Returns a parser for names that the help lists; other names are rejected where used."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(names)}}}",
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    )


ModelName = Annotated[str, listed(preset_names(), preset_spelling)]
"""A preset's name; a misspelt one gets a suggestion, which fixed choices would not give."""
StrategyChoice = Annotated[StrategyName, listed(get_args(StrategyName), find_strategy)]
"""A strategy's name, also with suggestions; zero2 means sharded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedCase:
    """A case that is timed in a separate process."""

    device: DeviceName
    warmup: int
    steps: int
    time_limit_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLimits:
    """Memory and time limits of one case."""

    memory_limit_gib: float | None = None
    """Memory limit of one case in GiB; by default, most of the free memory. On CUDA, the limit only
    decides which cases are skipped; the device enforces its own limit."""
    time_limit_s: float = 300.0
    """Seconds of warm-up and measuring per case; the samples until then, at least one, are the
    result."""

    def __post_init__(self) -> None:
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < 2**30:
            raise UsageError("--memory-limit-gib must be positive and finite")
        if not self.time_limit_s > 0:
            raise UsageError("--time-limit-s must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSweep:
    """Options of every measurement on several ranks."""

    world_size: int | None = None
    """Number of ranks to start; by default 2. Leave this out under torchrun, Slurm or the lab,
    which start the ranks themselves."""
    device: DeviceName = "auto"
    """cuda measures NCCL between GPUs; cpu measures gloo."""
    timeout_s: float = 300.0
    """Seconds after which a collective without progress is an error."""
    time_limit_s: float = 300.0
    """Seconds of measuring per case; the samples until then, at least one, are the result."""

    def __post_init__(self) -> None:
        if self.world_size is not None and self.world_size < 1:
            raise UsageError("--world-size must be at least 1")
        if not (self.time_limit_s > 0 and self.timeout_s > 0):
            raise UsageError("--time-limit-s and --timeout-s must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeOverrides:
    """Dimensions that override those of a model preset."""

    vocab_size: int | None = None
    """Vocabulary size."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the feed-forward layer."""
    num_layers: int | None = None
    """Number of transformer blocks."""
    num_heads: int | None = None
    """Query heads per attention layer."""
    num_kv_heads: int | None = None
    """Key-value heads (grouped-query attention)."""
    tied_embeddings: bool = False
    """Reuse the embedding's weights in the output layer."""

    def apply(self, name: str) -> tuple[str, ModelShape]:
        """Returns the unchanged preset, or the modified shape under the name custom."""
        replaced = {
            field: value
            for field, value in dataclasses.asdict(self).items()
            if value is not None and value is not False
        }
        shape = model_preset(name)
        if not replaced:
            return name, shape
        return "custom", dataclasses.replace(shape, **replaced)


def require_counts(*, warmup: tuple[int, ...], steps: int, name: str = "--steps") -> None:
    """Raises unless there is something to measure."""
    if min(warmup, default=0) < 0:
        raise UsageError("--warmup must not be negative")
    if steps < 1:
        raise UsageError(f"{name} must be at least 1")
