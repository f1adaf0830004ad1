"""A layout as a config of torchtitan.

torchtitan shards with FSDP2: parameters that are gathered for every pass are ZeRO-3, parameters
that stay gathered after forward come nearest to ZeRO-2, and there is nothing below that. Its tensor
parallelism always splits norms and residuals, too. A batch of several micro-batches is accumulated,
or, with pipeline stages, cut into micro-batches. What differs from the layout stands in comments.
"""

from collections.abc import Iterator

from paceline.planner.cost.layouts import SHARDING_STAGES
from paceline.planner.search.choice import Choice
from paceline.planner.search.question import SearchQuestion

_FLAVORS = {(32, 4096): "8B", (80, 8192): "70B", (126, 16384): "405B"}
"""Layers and width of the models that torchtitan calls by name."""


def torchtitan_config(choice: Choice, question: SearchQuestion) -> str:
    """Returns a TOML file."""
    lines = [f"# {choice.name}", *(f"# {note}" for note in torchtitan_notes(choice, question))]
    for section, values in _sections(choice, question):
        lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values)]
    return "\n".join(lines) + "\n"


def torchtitan_notes(choice: Choice, question: SearchQuestion) -> list[str]:
    """Returns in what torchtitan differs from the layout."""
    layout = choice.layout
    stage = SHARDING_STAGES[layout.sharding]
    notes = []
    if stage == 1:
        notes.append("torchtitan has no ZeRO-1: FSDP that keeps parameters gathered comes nearest")
    if layout.tensor > 1 and not layout.sequence_parallel:
        notes.append("torchtitan's tensor parallelism is always sequence parallel as well")
    shape = question.shape
    if (shape.num_layers, shape.d_model) not in _FLAVORS:
        notes.append("torchtitan has no model of this name: register its dimensions as a flavor")
    return notes


def _sections(
    choice: Choice, question: SearchQuestion
) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    layout, batch, shape = choice.layout, choice.batch, question.shape
    stages = layout.pipeline
    flavor = _FLAVORS.get((shape.num_layers, shape.d_model), "custom")
    converters = [("converters", ["float8"])] if question.float8_matmuls else []
    yield "model", [("name", "llama3"), ("flavor", flavor), *converters]
    passes = batch.accumulation_steps if stages > 1 else 1
    yield (
        "training",
        [
            ("local_batch_size", batch.num_sequences * passes),
            ("global_batch_size", question.global_batch),
            ("seq_len", question.context_length),
            ("mixed_precision_param", "bfloat16"),
            ("mixed_precision_reduce", "float32"),
        ],
    )
    reshards = "always" if SHARDING_STAGES[layout.sharding] == 3 else "never"
    axes: list[tuple[str, object]] = [
        ("data_parallel_replicate_degree", layout.replicate),
        ("data_parallel_shard_degree", layout.shard),
        ("fsdp_reshard_after_forward", reshards),
        ("tensor_parallel_degree", layout.tensor),
        ("context_parallel_degree", layout.context),
        ("pipeline_parallel_degree", stages),
    ]
    if stages > 1:
        interleaved = layout.pipeline_interleave > 1
        parts = stages * layout.pipeline_interleave
        counted = 0 if shape.num_layers % parts == 0 else 1
        axes += [
            ("pipeline_parallel_schedule", "Interleaved1F1B" if interleaved else "1F1B"),
            ("pipeline_parallel_layers_per_stage", (shape.num_layers + 2 * counted) // parts),
            ("pipeline_parallel_first_stage_less_layers", counted),
            ("pipeline_parallel_last_stage_less_layers", counted),
            ("pipeline_parallel_microbatch_size", batch.num_sequences),
        ]
    yield "parallelism", axes
    mode = layout.activation_checkpointing
    checkpointing: list[tuple[str, object]] = [("mode", mode)]
    if mode == "selective":
        checkpointing.append(("selective_ac_option", "op"))
    yield "activation_checkpoint", checkpointing


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
