"""Options that several sweeps and verbs share. Free of torch, for use by the command line.

Layouts are written as text: ``pipeline=2,interleave=2,shard=2``. Axes are named as in
`ParallelLayout`; omitted axes are 1. ``shard`` shards parameters unless ``zero`` selects another
stage; ``sp=1`` is sequence parallelism. ``micro`` is the number of sequences per micro-batch.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, get_args

import tyro

from paceline.core.errors import ShapeError, UsageError
from paceline.core.hardware import DeviceName, device_spelling, known_devices
from paceline.core.plan import SHARDINGS, ParallelLayout
from paceline.core.presets import mixture_names, model_preset, preset_names, preset_spelling
from paceline.core.specs import ModelShape, require_buildable, require_context
from paceline.core.strategies import StrategyName, find_strategy

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
_OTHER_MODELS = ("DIRECTORY", "CONFIG.json", "FILE.toml", "d_model=4096,num_layers=32,...")
PlannedModel = Annotated[
    str, listed((*preset_names(), *mixture_names(), *_OTHER_MODELS), preset_spelling)
]
"""A model that is planned and need not be built: what `find_model` accepts."""
DeviceChoice = Annotated[str, listed((device.name for device in known_devices()), device_spelling)]
"""A device of the hardware table, in any case."""
StrategyChoice = Annotated[StrategyName, listed(get_args(StrategyName), find_strategy)]
"""A strategy's name, also with suggestions; names of earlier versions are accepted."""


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
        """Returns a preset with these dimensions, under the name custom if they change it."""
        return self.change(name, model_preset(name))

    def change(self, name: str, shape: ModelShape) -> tuple[str, ModelShape]:
        """Returns a shape with these dimensions, under the name custom if they change it."""
        replaced = {
            field: value
            for field, value in dataclasses.asdict(self).items()
            if value is not None and value is not False
        }
        changed = dataclasses.replace(shape, **replaced)
        return (name if changed == shape else "custom"), changed

    def resolve(self, name: str, context: int) -> tuple[str, ModelShape]:
        """Returns name and shape of a model that can be built and has contexts of that length."""
        label, shape = self.apply(name)
        require_buildable(shape)
        require_context(name, shape, context)
        return label, shape


def require_counts(*, warmup: tuple[int, ...], steps: int, name: str = "--steps") -> None:
    """Raises unless there is something to measure."""
    if min(warmup, default=0) < 0:
        raise UsageError("--warmup must not be negative")
    if steps < 1:
        raise UsageError(f"{name} must be at least 1")


_AXES = ("replicate", "shard", "context", "tensor", "pipeline")
_KNOWN = (*_AXES, "interleave", "zero", "micro", "sp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutSpec:
    """A layout and the size of its micro-batches."""

    layout: ParallelLayout
    micro_batch: int
    """Sequences per forward pass."""

    @property
    def text(self) -> str:
        """The layout as text, without axes of size 1."""
        layout = self.layout
        numbers = {axis: getattr(layout, axis) for axis in _AXES}
        numbers["interleave"] = layout.pipeline_interleave
        words = [f"{name}={number}" for name, number in numbers.items() if number > 1]
        stage = SHARDINGS.index(layout.sharding)
        words += [f"zero={stage}"] if stage else []
        words += ["sp=1"] if layout.sequence_parallel else []
        return ",".join([*words, f"micro={self.micro_batch}"])

    def num_micro_batches(self, batch_size: int) -> int:
        """Returns the number of micro-batches of a data-parallel rank per step."""
        return batch_size // (self.layout.data_parallel * self.micro_batch)


def parse_layout(text: str) -> LayoutSpec:
    """Parses a layout such as ``pipeline=2,micro=1``; an error names the invalid part."""
    numbers: dict[str, int] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in _KNOWN or not value.isdecimal():
            raise UsageError(
                f"layout {text!r}: {word!r} is not one of {', '.join(_KNOWN)} with a number, such "
                "as pipeline=2"
            )
        if name in numbers:
            raise UsageError(f"layout {text!r}: {name} is given twice; leave one of them out")
        numbers[name] = int(value)
    shard = numbers.get("shard", 1)
    stage = numbers.get("zero", 3 if shard > 1 else 0)
    if stage >= len(SHARDINGS):
        raise UsageError(f"layout {text!r}: zero={stage} is not a ZeRO stage; use 0, 1, 2 or 3")
    if numbers.get("micro") == 0:
        raise UsageError(f"layout {text!r}: micro=0 has no sequences; use 1 or more")
    try:
        layout = ParallelLayout(
            replicate=numbers.get("replicate", 1),
            shard=shard,
            context=numbers.get("context", 1),
            tensor=numbers.get("tensor", 1),
            pipeline=numbers.get("pipeline", 1),
            pipeline_interleave=numbers.get("interleave", 1),
            sharding=SHARDINGS[stage],
            sequence_parallel=bool(numbers.get("sp", 0)),
        )
    except ShapeError as error:
        raise UsageError(f"layout {text!r}: {error}") from error
    return LayoutSpec(layout=layout, micro_batch=numbers.get("micro", 1))
