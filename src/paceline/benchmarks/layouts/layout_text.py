"""Layouts written as text: ``pipeline=2,interleave=2,shard=2``.

Axes are named as in `ParallelLayout`; omitted axes are 1. ``shard`` shards parameters unless
``zero`` selects another stage; ``sp=1`` is sequence parallelism, ``zb=1`` a zero-bubble schedule.
``micro`` is the number of sequences per micro-batch.
"""

import dataclasses

from paceline.core.errors import ShapeError, UsageError
from paceline.core.plan import SHARDINGS, ParallelLayout

_AXES = ("replicate", "shard", "context", "tensor", "pipeline")
_KNOWN = (*_AXES, "interleave", "zero", "micro", "sp", "zb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenLayout:
    """A layout and the size of its micro-batches."""

    layout: ParallelLayout
    micro_batch: int
    """Sequences per forward pass."""
    zero_bubble: bool = False
    """Whether a pipeline fills its waits with weight gradients, instead of running 1F1B."""

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
        words += ["zb=1"] if self.zero_bubble else []
        return ",".join([*words, f"micro={self.micro_batch}"])

    def num_micro_batches(self, batch_size: int) -> int:
        """Returns the number of micro-batches of a data-parallel rank per step."""
        return batch_size // (self.layout.data_parallel * self.micro_batch)


def parse_layout(text: str) -> WrittenLayout:
    """Parses a layout from text; an error names the invalid part.

    Args:
        text: A layout such as ``pipeline=2,micro=1``.
    """
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
    return WrittenLayout(
        layout=layout, micro_batch=numbers.get("micro", 1), zero_bubble=bool(numbers.get("zb", 0))
    )
