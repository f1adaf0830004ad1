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

_LAYOUT = (
    *("layout", *MODEL_FIELDS, "batch", "batch_size", "context"),
    *("precision", "float32_matmul_precision", "attention", "optimizer"),
    *("world_size", "num_hosts", "backend", *_PLACE),
)

_WARMUP_STEPS = ("warmup", "steps")
_WARMUP_ROUNDS = ("baseline", "warmup", "rounds")

# By name, the join key and the method.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "step": (_STEP, _WARMUP_STEPS),
    # Memory over one such step, and its largest allocations.
    "memory_timeline": (_STEP, _WARMUP_STEPS),
    "allocation": (("subject", "number"), ("category", "operator", "place")),
    "attention": (
        (
            *("implementation", "batch", "context", "head_dim", "causal", "dtype"),
            *("float32_matmul_precision", "compile", *_PLACE),
        ),
        (*_WARMUP_STEPS, "timer"),
    ),
    # What a compiler made of a kernel for an architecture, and the bounds of its speed.
    "kernel": (
        (
            *("kernel", "architecture", "dtype", "head_dim", "mask", "lengths", "group"),
            *("block_queries", "block_keys", "num_warps", "num_stages", "triton"),
        ),
        (),
    ),
    # Two ways to do the same, measured in turn in one run; its metrics are ratios.
    "comparison": (
        ("subject", "baseline", *_PLACE),
        (
            *("model", "batch", "context", "phase", "operation", "size_bytes", "world_size"),
            *("warmup", "rounds"),
        ),
    ),
    "comm": (("operation", "size_bytes", *_GROUP, *_PLACE), _WARMUP_STEPS),
    # Training steps under one of several strategies that were measured in turn.
    "ddp": (_DATA_PARALLEL, _WARMUP_ROUNDS),
    # Memory of such steps by what it holds, one strategy after the other.
    "optimizer": (_DATA_PARALLEL, _WARMUP_STEPS),
    # Where the time of such steps went on one rank, and one of them in detail.
    "timeline": ((*_DATA_PARALLEL, "rank"), _WARMUP_ROUNDS),
    # Training steps under one of several layouts; `batch` is a micro-batch, `batch_size` a step's.
    "layout": (_LAYOUT, _WARMUP_ROUNDS),
    # Where the steps of such a layout went: computing, only communicating, neither.
    "layout_trace": (_LAYOUT, ("warmup", "rounds")),
    # What the stages of such a layout did when, and how long they stood still.
    "pipeline": (_LAYOUT, ("warmup", "rounds")),
    # What a trace tells: of the steps of a rank, and of the operators inside of a range.
    "trace_step": (("subject", "rank", "label"), ()),
    "trace_analysis": (("size_bytes", *_PLACE), ()),
    "operator": (("subject", "range", "work", "operator"), ()),
    "collective_fit": (("operation", "smallest_bytes", "largest_bytes", *_GROUP, *_PLACE), ()),
    # What a machine reaches on one part of a training step, for predictions.
    "calibration": (
        ("quantity", *_GROUP, *_PLACE),
        (
            *("tokens", "inputs", "outputs"),
            *("batch", "context", "num_heads", "num_kv_heads", "head_dim", "attention"),
            *("operation", "size_bytes", "smallest_bytes", "largest_bytes"),
            "engine",
            "float32_matmul_precision",
        ),
    ),
    # What a method of scaling laws says of a budget; studies judge methods by known truths.
    "scaling": (("method", "compute_budget"), ()),
    # A method's loss at a budget beyond those of a real sweep that it was shown.
    "scaling_backtest": (("sweep", "method", "num_budgets", "compute_budget"), ("fitted",)),
    # A published peak of memory beside the accounting's; or how many rows had such a verdict.
    "published_memory": (("run", "framework", "verdict"), ("model", "outcome")),
    "scaling_run": (
        ("compute_budget", "parameters"),
        ("d_model", "num_layers", "num_heads", "batch_size", "learning_rate"),
    ),
    "scaling_study": (
        ("study", "noise"),
        ("departure", "num_sweeps", "num_draws", "level", "total_flops"),
    ),
    # Random training programs under a container, compared with one process.
    "fuzz": (
        ("container", "first_seed", "programs", "world_size", *_PLACE),
        ("dtype", "tolerance"),
    ),
    # What one rank of many pays before the first step.
    "construction": (("subject", "parameters", "world_size", *_PLACE), ()),
    # A whole run of the trainer; `batch` is a micro-batch of one rank.
    "training_run": (
        _DATA_PARALLEL,
        ("layout", "steps", "batch_size", "learning_rate", "schedule", "seed"),
    ),
    # One quantity of a run that was predicted and measured, for later predictions.
    "forecast": (("quantity", "run", "parameters", "world_size", "threads", "hardware"), ()),
    # Reading training data, beside another way to do it where there is a baseline.
    "data_loader": (
        ("subject", "context", "batch", "num_tokens", "num_shards", *_PLACE),
        ("baseline", "rounds", "first_sample"),
    ),
    # Faults of one sort that something was made to suffer: tried, survived, lost.
    "fault": (
        ("subject", "fault"),
        (
            *("world_size", "strategy", "steps", "seed", *_PLACE),
            *("hash_every_steps", "hash_at_rest", "heartbeat_timeout_s"),
        ),
    ),
    # The simulated share of a long run that trains, by what is done about failures.
    "goodput": (
        ("devices", "recovery", "checkpoint", "spare_hosts", "constants"),
        (
            *("days", "device_interval_h", "detection_s", "restart_s", "heal_s"),
            *("devices_per_replica", "trials", "seed"),
        ),
    ),
    # A layout that a search found, beside one that was published or asked for.
    "plan_search": (
        ("study", "model", "device", "devices", "batch_tokens", "context", "rank", "layout"),
        ("calibration", "bound", "num_devices_used", "on_front", "reason"),
    ),
    # Published step times predicted without their model: errors, intervals, regret by source.
    "planner_validation": (("study", "source", "without"), ()),
    # How long such a search takes.
    "plan_search_speed": (("model", "devices", "batch_tokens", "context"), ("candidates",)),
    # A published run, simulated with what was not published varied.
    "goodput_replay": (("run", "assumption"), ("detection_s", "restart_s", "trials", "seed")),
    # A fault that was inflicted on a run on purpose, and such a run as a whole.
    "chaos_fault": (("command", "seed", "num_hosts", "fault", "number"), ("target",)),
    "chaos_run": (("command", "seed", "num_hosts"), ("for_s",)),
    # Clients of one store that meet: what a rendezvous of so many ranks asks of it.
    "rendezvous": (("subject", "clients", *_PLACE), ("processes", "rounds")),
    # One check of the acceptance run on GPUs.
    "check": (("name", "world_size", "backend", *_PLACE), ()),
    # What became of a command that was to measure something for a report.
    ATTEMPT: (("name",), ("deliverables", "command")),
    "environment": (_PLACE, ("self_test", "world_size", "backend")),
}
_KINDS = {
    name: Kind(name=name, join_key=join_key, method=method)
    for name, (join_key, method) in _FIELDS.items()
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
