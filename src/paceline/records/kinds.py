"""The kinds of records and the fields of their cases.

A case holds everything that changes the expected value of a measurement. Of its fields,
the join key is what a prediction of that measurement must agree on; the others say how it
was taken. A field that its kind does not declare is refused, on writing as on reading: a
mistyped field would otherwise make two different measurements look like the same one.
"""

import dataclasses

from paceline.core.errors import RecordError

PREDICTION = "prediction"
PREDICTS = "predicts"
ATTEMPT = "attempt"

# Every kind of case may say what network it ran on: what its links were shaped to, on which
# predictions join as well, and what a stream reached on them.
LINK_RATE = "link_rate_bits_per_s"
LINK_LOSS = "link_loss"
LINK_DELAY = "link_delay_s"
LINK_SHAPE = (LINK_RATE, LINK_LOSS, LINK_DELAY)
MEASURED_LINK_RATE = "measured_link_rate_bits_per_s"
LINK_FIELDS = (*LINK_SHAPE, MEASURED_LINK_RATE)

_PLACE = ("device", "hardware", "threads")
_GROUP = ("world_size", "num_hosts", "dtype", "backend")
MODEL_FIELDS = (
    *("model", "vocab_size", "d_model", "d_ff", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "tied_embeddings"),
)
"""A model's name and the dimensions that it stands for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What a kind of record says of its case."""

    name: str
    """The record's `kind`."""
    join_key: tuple[str, ...]
    """Case fields on which a prediction joins its measurement; all are required."""
    method: tuple[str, ...] = ()
    """Further case fields: how the measurement was taken."""

    @property
    def case_fields(self) -> tuple[str, ...]:
        """Every field that a case of this kind may have."""
        return (*self.join_key, *LINK_FIELDS, *self.method)


_HOW = (
    *("precision", "float32_matmul_precision", "compile"),
    *("activation_checkpointing", "attention", "optimizer"),
)
_STEP = (*MODEL_FIELDS, "batch", "context", "phase", *_HOW, *_PLACE)
_DATA_PARALLEL = (
    *("strategy", "bucket_size_mb", *MODEL_FIELDS, "batch", "context", *_HOW),
    *("world_size", "num_hosts", "backend", *_PLACE),
)

_KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="step", join_key=_STEP, method=("warmup", "steps")),
        # Memory over one such step, and its largest allocations.
        Kind(name="memory_timeline", join_key=_STEP, method=("warmup", "steps")),
        Kind(
            name="allocation",
            join_key=("subject", "number"),
            method=("category", "operator", "place"),
        ),
        Kind(
            name="attention",
            join_key=(
                *("implementation", "batch", "context", "head_dim", "causal", "dtype"),
                *("float32_matmul_precision", "compile", *_PLACE),
            ),
            method=("warmup", "steps", "timer"),
        ),
        # What a compiler made of a kernel for an architecture, and the bounds of its speed.
        Kind(
            name="kernel",
            join_key=(
                *("kernel", "architecture", "dtype", "head_dim", "mask", "lengths", "group"),
                *("block_queries", "block_keys", "num_warps", "num_stages", "triton"),
            ),
        ),
        # Two ways to do the same, measured in turn in one run; its metrics are ratios.
        Kind(
            name="comparison",
            join_key=("subject", "baseline", *_PLACE),
            method=(
                *("model", "batch", "context", "phase"),
                *("operation", "size_bytes", "world_size"),
                *("warmup", "rounds"),
            ),
        ),
        Kind(
            name="comm",
            join_key=("operation", "size_bytes", *_GROUP, *_PLACE),
            method=("warmup", "steps"),
        ),
        # Training steps under one of several strategies that were measured in turn.
        Kind(name="ddp", join_key=_DATA_PARALLEL, method=("baseline", "warmup", "rounds")),
        # Memory of such steps by what it holds, one strategy after the other.
        Kind(name="optimizer", join_key=_DATA_PARALLEL, method=("warmup", "steps")),
        # Where the time of such steps went on one rank, and one of them in detail.
        Kind(
            name="timeline",
            join_key=(*_DATA_PARALLEL, "rank"),
            method=("baseline", "warmup", "rounds"),
        ),
        # What a trace tells: of the steps of a rank, and of the operators inside of a range.
        Kind(name="trace_step", join_key=("subject", "rank", "label")),
        Kind(name="trace_analysis", join_key=("size_bytes", *_PLACE)),
        Kind(name="operator", join_key=("subject", "range", "work", "operator")),
        Kind(
            name="collective_fit",
            join_key=("operation", "smallest_bytes", "largest_bytes", *_GROUP, *_PLACE),
        ),
        # What a machine reaches on one part of a training step, for predictions.
        Kind(
            name="calibration",
            join_key=("quantity", *_GROUP, *_PLACE),
            method=(
                *("tokens", "inputs", "outputs"),
                *("batch", "context", "num_heads", "num_kv_heads", "head_dim", "attention"),
                *("operation", "size_bytes", "smallest_bytes", "largest_bytes"),
                "float32_matmul_precision",
            ),
        ),
        # What a method of scaling laws says of a budget; studies judge methods by known truths.
        Kind(name="scaling", join_key=("method", "compute_budget")),
        Kind(
            name="scaling_run",
            join_key=("compute_budget", "parameters"),
            method=("d_model", "num_layers", "num_heads", "batch_size", "learning_rate"),
        ),
        Kind(
            name="scaling_study",
            join_key=("study", "noise"),
            method=("departure", "num_sweeps", "num_draws", "level", "total_flops"),
        ),
        # What became of a command that was to measure something for a report.
        Kind(name=ATTEMPT, join_key=("name",), method=("deliverables", "command")),
        Kind(name="environment", join_key=_PLACE, method=("self_test", "world_size", "backend")),
    )
}


def known_kinds() -> tuple[str, ...]:
    """Returns the names of all kinds of measurements."""
    return tuple(_KINDS)


def find_kind(name: str) -> Kind:
    """Returns the kind of that `name`, such as step, ddp or comm; an unknown one is an error."""
    if name not in _KINDS:
        known = ", ".join((*_KINDS, PREDICTION))
        raise RecordError(f"kind: unknown record kind {name!r}; known: {known}")
    return _KINDS[name]
