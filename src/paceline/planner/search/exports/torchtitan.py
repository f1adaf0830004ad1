"""Exports a layout as a torchtitan config.

torchtitan shards with FSDP2. Resharding after forward is ZeRO-3. Keeping parameters gathered after
forward is closest to ZeRO-2. There is no equivalent of ZeRO-1. Tensor parallelism always includes
sequence parallelism. Several micro-batches become gradient accumulation, or micro-batches of the
pipeline schedule. Comments in the config list the differences from the layout.

Expert ranks are whole groups of context and tensor ranks (`expert_tensor_parallel_degree` 1) that
divide the sharded ranks. Other numbers of expert ranks are refused, as are mixtures of experts for
which torchtitan has no model.
"""

from collections.abc import Iterator

from paceline.planner.cost.layouts import SHARDING_STAGES
from paceline.planner.search.choice import Choice
from paceline.planner.search.question import SearchQuestion

_FLAVORS = {(32, 4096): "8B", (80, 8192): "70B", (126, 16384): "405B"}
"""torchtitan's Llama 3 flavors, by layers and width."""
_MIXTURES = {
    (48, 2048, 128): ("qwen3", "30B-A3B"),
    (94, 4096, 128): ("qwen3", "235B-A22B"),
    (61, 7168, 256): ("deepseek_v3", "671B"),
}
"""Model and flavor of torchtitan's mixtures of experts, by layers, width and experts."""


def torchtitan_config(choice: Choice, question: SearchQuestion) -> str:
    """Returns the config as TOML text."""
    lines = [f"# {choice.name}", *(f"# {note}" for note in torchtitan_notes(choice, question))]
    for section, values in _sections(choice, question):
        lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values)]
    return "\n".join(lines) + "\n"


def torchtitan_refusal(choice: Choice, question: SearchQuestion) -> str | None:
    """Returns the reason why a layout has no config; None if it has one."""
    experts, layout = question.experts, choice.layout
    if experts is None:
        return None
    if _mixture(question) is None:
        return "torchtitan has no model of this mixture of experts"
    group = layout.context * layout.tensor
    if layout.expert > 1 and (layout.expert % group or group * layout.shard % layout.expert):
        return (
            f"torchtitan has no {layout.expert} expert ranks here: it wants a multiple of {group} "
            f"(context x tensor) that divides {group * layout.shard} (with shards)"
        )
    return None


def _mixture(question: SearchQuestion) -> tuple[str, str] | None:
    shape, experts = question.shape, question.experts
    assert experts is not None
    return _MIXTURES.get((shape.num_layers, shape.d_model, experts.num_experts))


def torchtitan_notes(choice: Choice, question: SearchQuestion) -> list[str]:
    """Returns the differences between torchtitan's config and the layout."""
    layout = choice.layout
    stage = SHARDING_STAGES[layout.sharding]
    notes = []
    if stage == 1:
        notes.append("torchtitan has no ZeRO-1: FSDP that keeps parameters gathered comes nearest")
    if layout.tensor > 1 and not layout.sequence_parallel:
        notes.append("torchtitan's tensor parallelism is always sequence parallel as well")
    shape = question.shape
    if question.experts is not None:
        if question.float8_matmuls:
            notes.append("float8 of experts has a converter of its own in torchtitan: not set here")
        if layout.expert == 1 and layout.tensor > 1:
            notes.append("with one expert rank torchtitan splits each expert over tensor ranks")
    elif (shape.num_layers, shape.d_model) not in _FLAVORS:
        notes.append("torchtitan has no model of this name: register its dimensions as a flavor")
    return notes


def _sections(
    choice: Choice, question: SearchQuestion
) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    layout, batch, shape = choice.layout, choice.batch, question.shape
    stages = layout.pipeline
    model = ("llama3", _FLAVORS.get((shape.num_layers, shape.d_model), "custom"))
    if question.experts is not None:
        model = _mixture(question) or model
    converters = [("converters", ["float8"])] if question.float8_matmuls else []
    yield "model", [("name", model[0]), ("flavor", model[1]), *converters]
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
    if question.experts is not None:
        axes += [("expert_parallel_degree", layout.expert), ("expert_tensor_parallel_degree", 1)]
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
