"""The kinds of records and the fields of their cases.

A case holds everything that changes the expected value of a measurement. A prediction joins
a measurement on the fields of the join key; the other fields describe the method. Fields that
a kind does not declare are rejected on writing and reading: otherwise a misspelled field would
make two different measurements look the same.
"""

import dataclasses

from paceline.core.errors import RecordError

PREDICTION = "prediction"
PREDICTS = "predicts"
ATTEMPT = "attempt"

# Every kind of case may describe its network: the shaping of the links of hosts and of the uplinks
# of sites, on which predictions also join, and the rates that a stream reached on them.
LINK_RATE = "link_rate_bits_per_s"
LINK_LOSS = "link_loss"
LINK_DELAY = "link_delay_s"
NUM_SITES = "num_sites"
SITE_RATE = "site_rate_bits_per_s"
SITE_LOSS = "site_loss"
SITE_DELAY = "site_delay_s"
LINK_SHAPE = (*(LINK_RATE, LINK_LOSS, LINK_DELAY), *(NUM_SITES, SITE_RATE, SITE_LOSS, SITE_DELAY))
MEASURED_LINK_RATE = "measured_link_rate_bits_per_s"
MEASURED_SITE_RATE = "measured_site_rate_bits_per_s"
MEASURED_RATES = (MEASURED_LINK_RATE, MEASURED_SITE_RATE)
"""Part of a case, but different whenever it is measured again."""
LINK_FIELDS = (*LINK_SHAPE, *MEASURED_RATES)

COMPRESSION = "compression"
"""How gradients are compressed; records of uncompressed ones do not have the field."""

_MACHINE = ("device", "hardware", "threads")
_GROUP = ("world_size", "num_hosts", "dtype", "backend")
MODEL_FIELDS = (
    *("model", "vocab_size", "d_model", "d_ff", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "tied_embeddings"),
)
"""A model's name and its dimensions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of record and the fields of its cases."""

    name: str
    """The record's `kind`."""
    join_key: tuple[str, ...]
    """Case fields on which a prediction joins its measurement; all are required."""
    method: tuple[str, ...] = ()
    """Optional case fields that describe how the measurement was taken."""

    @property
    def case_fields(self) -> tuple[str, ...]:
        """All fields that a case of this kind may have."""
        return (*self.join_key, *LINK_FIELDS, *self.method)


_HOW = (
    *("precision", "float32_matmul_precision", "compile"),
    *("activation_checkpointing", "attention", "optimizer"),
)
_STEP = (*MODEL_FIELDS, "batch", "context", "phase", *_HOW, *_MACHINE)
_DATA_PARALLEL = (
    *("strategy", "bucket_size_mb", *MODEL_FIELDS, "batch", "context", *_HOW),
    *("world_size", "num_hosts", "backend", *_MACHINE),
)

_LAYOUT = (
    *("layout", *MODEL_FIELDS, "batch", "batch_size", "context"),
    *("precision", "float32_matmul_precision", "attention", "optimizer"),
    *("world_size", "num_hosts", "backend", *_MACHINE),
)

_WARMUP_STEPS = ("warmup", "steps")
_WARMUP_ROUNDS = ("baseline", "warmup", "rounds")

# The join key and the method fields of each kind.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "step": (_STEP, _WARMUP_STEPS),
    # Memory over one training step, and its largest allocations.
    "memory_timeline": (_STEP, _WARMUP_STEPS),
    "allocation": (("subject", "number"), ("category", "operator", "place")),
    "attention": (
        (
            *("implementation", "batch", "context", "head_dim", "causal", "dtype"),
            *("float32_matmul_precision", "compile", *_MACHINE),
        ),
        (*_WARMUP_STEPS, "timer"),
    ),
    # A kernel compiled for an architecture, and the bounds on its speed.
    "kernel": (
        (
            *("kernel", "architecture", "dtype", "head_dim", "mask", "lengths", "group"),
            *("block_queries", "block_keys", "num_warps", "num_stages", "triton"),
        ),
        (),
    ),
    # Two alternatives measured in alternation in one run; the metrics are ratios.
    "comparison": (
        ("subject", "baseline", *_MACHINE),
        (
            *("model", "batch", "context", "phase", "operation", "size_bytes", "world_size"),
            *("warmup", "rounds"),
        ),
    ),
    "comm": (("operation", "size_bytes", *_GROUP, *_MACHINE), _WARMUP_STEPS),
    # Training steps under one of several strategies, measured in alternation.
    "ddp": (_DATA_PARALLEL, (COMPRESSION, *_WARMUP_ROUNDS)),
    # Memory of such steps by category, measured one strategy after the other.
    "optimizer": (_DATA_PARALLEL, _WARMUP_STEPS),
    # Time breakdown of such steps on one rank, and one step in detail.
    "timeline": ((*_DATA_PARALLEL, "rank"), (COMPRESSION, *_WARMUP_ROUNDS)),
    # Peak memory of a run's step on accelerators, and its forecast; the fullest rank.
    "device_memory": (
        (
            *("strategy", "layout", *MODEL_FIELDS, "batch", "context", "precision"),
            *("activation_checkpointing", "passes", "clips", "world_size", *_MACHINE),
        ),
        (),
    ),
    # Training steps under one of several layouts; `batch` is a micro-batch, `batch_size` a step's.
    "layout": (_LAYOUT, _WARMUP_ROUNDS),
    # Time breakdown of such a layout's steps: compute, exposed communication, neither.
    "layout_trace": (_LAYOUT, ("warmup", "rounds")),
    # Schedule of the pipeline stages of such a layout, and their idle time.
    "pipeline": (_LAYOUT, ("warmup", "rounds")),
    # Results of traces: the steps of a rank, the cost of the analysis, the operators in a range.
    "trace_step": (("subject", "rank", "label"), ()),
    "trace_analysis": (("size_bytes", *_MACHINE), ()),
    "operator": (("subject", "range", "work", "operator"), ()),
    "collective_fit": (("operation", "smallest_bytes", "largest_bytes", *_GROUP, *_MACHINE), ()),
    # Measured performance of a machine on one part of a training step, for predictions.
    "calibration": (
        ("quantity", *_GROUP, *_MACHINE),
        (
            *("tokens", "inputs", "outputs"),
            *("batch", "context", "num_heads", "num_kv_heads", "head_dim", "attention"),
            *("operation", "size_bytes", "smallest_bytes", "largest_bytes"),
            "engine",
            "float32_matmul_precision",
        ),
    ),
    # Prediction of a scaling-law method for a budget; studies test methods on known ground truth.
    "scaling": (("method", "compute_budget"), ()),
    # A method's loss at a budget of a real sweep beyond the budgets that it was fitted to.
    "scaling_backtest": (("sweep", "method", "num_budgets", "compute_budget"), ("fitted",)),
    # A published peak memory compared with the accounting's, or the number of rows per verdict.
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
        ("container", "first_seed", "programs", "world_size", *_MACHINE),
        ("dtype", "tolerance"),
    ),
    # Cost on one rank of many before the first step.
    "construction": (("subject", "parameters", "world_size", *_MACHINE), ()),
    # A whole run of the trainer; `batch` is a micro-batch of one rank.
    "training_run": (
        _DATA_PARALLEL,
        ("layout", "steps", "batch_size", "learning_rate", "schedule", "seed"),
    ),
    # One quantity of a run, predicted and measured, for later predictions.
    "forecast": (("quantity", "run", "parameters", "world_size", "threads", "hardware"), ()),
    # Reading training data, compared with a baseline if there is one.
    "data_loader": (
        ("subject", "context", "batch", "num_tokens", "num_shards", *_MACHINE),
        ("baseline", "rounds", "first_sample"),
    ),
    # Injected faults of one type: attempts, survivals, losses.
    "fault": (
        ("subject", "fault"),
        (
            *("world_size", "strategy", "steps", "seed", *_MACHINE),
            *("hash_every_steps", "hash_at_rest", "heartbeat_timeout_s"),
        ),
    ),
    # Simulated fraction of a long run spent training, by recovery policy.
    "goodput": (
        ("devices", "recovery", "checkpoint", "spare_hosts", "constants"),
        (
            *("days", "device_interval_h", "detection_s", "restart_s", "heal_s"),
            *("devices_per_replica", "trials", "seed"),
        ),
    ),
    # A layout found by a search, compared with a published or requested one.
    "plan_search": (
        ("study", "model", "device", "devices", "batch_tokens", "context", "rank", "layout"),
        ("calibration", "bound", "num_devices_used", "on_front", "reason"),
    ),
    # Published step times predicted with their model held out: errors, intervals, regret by source.
    "planner_validation": (("study", "source", "without"), ("how", "num_own_runs")),
    # Duration of a plan search.
    "plan_search_speed": (("model", "devices", "batch_tokens", "context"), ("candidates",)),
    # A simulation of a published run that varies its unpublished parameters.
    "goodput_replay": (("run", "assumption"), ("detection_s", "restart_s", "trials", "seed")),
    # A fault injected into a run, and such a run as a whole.
    "chaos_fault": (("command", "seed", "num_hosts", "fault", "number"), ("target",)),
    "chaos_run": (("command", "seed", "num_hosts"), ("for_s",)),
    # Clients of one store that meet: the latency of a rendezvous by number of clients.
    "rendezvous": (("subject", "clients", *_MACHINE), ("processes", "rounds")),
    # One check of the acceptance run on GPUs.
    "check": (("name", "world_size", "backend", *_MACHINE), ()),
    # Outcome of a command that was run to measure something for a report.
    ATTEMPT: (("name",), ("deliverables", "command")),
    "environment": (_MACHINE, ("self_test", "world_size", "backend")),
}
_KINDS = {
    name: Kind(name=name, join_key=join_key, method=method)
    for name, (join_key, method) in _FIELDS.items()
}


def known_kinds() -> tuple[str, ...]:
    """Returns the names of all kinds of measurements."""
    return tuple(_KINDS)


def find_kind(name: str) -> Kind:
    """Returns the kind called `name`, such as step, ddp or comm; raises if it is unknown."""
    if name not in _KINDS:
        known = ", ".join((*_KINDS, PREDICTION))
        raise RecordError(f"kind: unknown record kind {name!r}; known: {known}")
    return _KINDS[name]
