"""Writes the files of a layout: plan.json, torchtitan.toml, megatron.args, commands.sh.

torchtitan shards with FSDP2. Resharding after forward is ZeRO-3; keeping parameters gathered is
closest to ZeRO-2; there is no ZeRO-1. Tensor parallelism always includes sequence parallelism.
Several micro-batches become gradient accumulation, or micro-batches of the pipeline schedule.
Expert ranks are whole groups of context and tensor ranks (`expert_tensor_parallel_degree` 1) that
divide the sharded ranks; others are refused, as are mixtures of experts that torchtitan lacks.

Megatron-LM's pretrain_gpt.py has flags: ZeRO-1 is the distributed optimizer, with one instance per
replica and states sharded over data and context ranks together; ZeRO-2 and 3 are Megatron FSDP.
Whole experts are distributed over expert ranks, with all-to-all dispatch. A shape does not include
the widths of latent attention, so the user must add those flags.

Other differences from the layout are comments in both files.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

from paceline.core.plan import Estimate, Plan
from paceline.core.specs import ModelShape
from paceline.planner.search.search import Candidate
from paceline.planner.search.spec import SearchSpec
from paceline.predict.cost.layouts import SHARDING_STAGES
from paceline.records import encode_plan


def paceline_plan(choice: Candidate, spec: SearchSpec, hardware: str) -> Plan:
    """Returns the plan of a layout."""
    predictions = {
        "step_time_s": choice.step_time_s,
        "tokens_per_s": Estimate(value=choice.tokens_per_s),
        "peak_bytes": Estimate(value=choice.peak_bytes),
    }
    if choice.mfu is not None:
        predictions["mfu"] = Estimate(value=choice.mfu)
    shape = spec.shape
    return Plan(
        model=dataclasses.replace(
            shape, max_context_length=max(shape.max_context_length, spec.context_length)
        ),
        batch=choice.batch,
        precision=spec.precision,
        layout=choice.layout,
        hardware=hardware,
        predictions=predictions,
        experts=spec.experts,
    )


_FLAVORS = {(32, 4096): "8B", (80, 8192): "70B", (126, 16384): "405B"}
"""torchtitan's Llama 3 flavors, by layers and width."""
_MIXTURES = {
    (48, 2048, 128): ("qwen3", "30B-A3B"),
    (94, 4096, 128): ("qwen3", "235B-A22B"),
    (61, 7168, 256): ("deepseek_v3", "671B"),
}
"""Model and flavor of torchtitan's mixtures of experts, by layers, width and experts."""


def torchtitan_config(choice: Candidate, spec: SearchSpec) -> str:
    """Returns the config as TOML text."""
    lines = [f"# {choice.name}", *(f"# {note}" for note in torchtitan_notes(choice, spec))]
    for section, values in _sections(choice, spec):
        lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values)]
    return "\n".join(lines) + "\n"


def torchtitan_refusal(choice: Candidate, spec: SearchSpec) -> str | None:
    """Returns the reason why a layout has no config; None if it has one."""
    experts, layout = spec.experts, choice.layout
    if experts is None:
        return None
    if _mixture(spec) is None:
        return "torchtitan has no model of this mixture of experts"
    group = layout.context * layout.tensor
    if layout.expert > 1 and (layout.expert % group or group * layout.shard % layout.expert):
        return (
            f"torchtitan has no {layout.expert} expert ranks here: it wants a multiple of {group} "
            f"(context x tensor) that divides {group * layout.shard} (with shards)"
        )
    return None


def _mixture(spec: SearchSpec) -> tuple[str, str] | None:
    shape, experts = spec.shape, spec.experts
    assert experts is not None
    return _MIXTURES.get((shape.num_layers, shape.d_model, experts.num_experts))


def torchtitan_notes(choice: Candidate, spec: SearchSpec) -> list[str]:
    """Returns the differences between torchtitan's config and the layout."""
    layout = choice.layout
    stage = SHARDING_STAGES[layout.sharding]
    notes = []
    if stage == 1:
        notes.append("torchtitan has no ZeRO-1: FSDP that keeps parameters gathered comes nearest")
    if layout.tensor > 1 and not layout.sequence_parallel:
        notes.append("torchtitan's tensor parallelism is always sequence parallel as well")
    shape = spec.shape
    if spec.experts is not None:
        if spec.float8_matmuls:
            notes.append("float8 of experts has a converter of its own in torchtitan: not set here")
        if layout.expert == 1 and layout.tensor > 1:
            notes.append("with one expert rank torchtitan splits each expert over tensor ranks")
    elif (shape.num_layers, shape.d_model) not in _FLAVORS:
        notes.append("torchtitan has no model of this name: register its dimensions as a flavor")
    return notes


def _sections(
    choice: Candidate, spec: SearchSpec
) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    layout, batch, shape = choice.layout, choice.batch, spec.shape
    stages = layout.pipeline
    model = ("llama3", _FLAVORS.get((shape.num_layers, shape.d_model), "custom"))
    if spec.experts is not None:
        model = _mixture(spec) or model
    converters = [("converters", ["float8"])] if spec.float8_matmuls else []
    yield "model", [("name", model[0]), ("flavor", model[1]), *converters]
    passes = batch.accumulation_steps if stages > 1 else 1
    yield (
        "training",
        [
            ("local_batch_size", batch.num_sequences * passes),
            ("global_batch_size", spec.global_batch),
            ("seq_len", spec.context_length),
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
    if spec.experts is not None:
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


_FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_flags(choice: Candidate, spec: SearchSpec) -> list[str]:
    """Returns the flags, one flag with its value per entry."""
    return [
        *_model_flags(spec),
        *_batch_flags(choice, spec),
        *_mesh_flags(choice, spec.shape.num_layers),
        *_expert_flags(choice, spec),
        *_sharding_flags(choice),
        *_recomputation_flags(choice),
    ]


def megatron_notes(choice: Candidate, spec: SearchSpec) -> tuple[str, ...]:
    """Returns notes to read before using the flags."""
    notes = ["data, learning rate and checkpoints are yours to add"]
    vocab, tensor = spec.shape.vocab_size, choice.layout.tensor
    if vocab % (128 * tensor):
        notes.append(f"Megatron pads the vocabulary of {vocab:,} to a multiple of {128 * tensor}")
    if spec.shape.attention_weights is not None:
        notes.append(
            "latent attention: add --multi-latent-attention and its ranks and head widths "
            "(--q-lora-rank, --kv-lora-rank, --qk-head-dim, --qk-pos-emb-head-dim, --v-head-dim)"
        )
    elif spec.shape.further_parameters:
        notes.append(
            "this model has norms of heads or biases of some matrices: add --qk-layernorm or "
            "--add-qkv-bias as its config.json says"
        )
    if spec.experts is not None:
        notes.append("how the router scores and balances is Megatron's default: see --moe-router-*")
    return tuple(notes)


def _model_flags(spec: SearchSpec) -> Iterator[str]:
    shape, experts, context_length = spec.shape, spec.experts, spec.context_length
    yield f"--num-layers {shape.num_layers}"
    yield f"--hidden-size {shape.d_model}"
    width = shape.d_ff if experts is None else experts.dense_width or experts.width
    yield f"--ffn-hidden-size {width}"
    yield f"--num-attention-heads {shape.num_heads}"
    if shape.attention_weights is None:
        yield from _head_flags(shape)
    yield f"--seq-length {context_length}"
    yield f"--max-position-embeddings {max(context_length, shape.max_context_length)}"
    if shape.feed_forward == "swiglu":
        yield "--swiglu"
    if shape.norm == "rmsnorm":
        yield "--normalization RMSNorm"
    if shape.positions == "rotary":
        yield "--position-embedding-type rope"
        yield f"--rotary-base {shape.rope_theta:.0f}"
    if not shape.biases:
        yield "--disable-bias-linear"
    if not shape.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"


def _head_flags(shape: ModelShape) -> Iterator[str]:
    if shape.head_dim is not None:
        yield f"--kv-channels {shape.head_dim}"
    if shape.key_value_heads != shape.num_heads:
        yield "--group-query-attention"
        yield f"--num-query-groups {shape.key_value_heads}"


def _batch_flags(choice: Candidate, spec: SearchSpec) -> Iterator[str]:
    yield f"--micro-batch-size {choice.batch.num_sequences}"
    yield f"--global-batch-size {spec.global_batch}"
    if spec.precision.compute == "bfloat16":
        yield "--bf16"
    elif spec.precision.compute == "float16":
        yield "--fp16"
    if spec.float8_matmuls:
        yield "--fp8-format hybrid"


def _mesh_flags(choice: Candidate, num_layers: int) -> Iterator[str]:
    layout = choice.layout
    yield f"--tensor-model-parallel-size {layout.tensor}"
    if layout.sequence_parallel:
        yield "--sequence-parallel"
    yield f"--context-parallel-size {layout.context}"
    yield f"--pipeline-model-parallel-size {layout.pipeline}"
    if layout.pipeline_interleave > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.pipeline_interleave}"
    if num_layers % (layout.pipeline * layout.pipeline_interleave):
        # The layers divide evenly only if embedding and output layer count as one layer each.
        yield "--account-for-embedding-in-pipeline-split"
        yield "--account-for-loss-in-pipeline-split"


def _expert_flags(choice: Candidate, spec: SearchSpec) -> Iterator[str]:
    experts = spec.experts
    if experts is None:
        return
    yield f"--num-experts {experts.num_experts}"
    yield f"--moe-router-topk {experts.experts_per_token}"
    yield f"--moe-ffn-hidden-size {experts.width}"
    if experts.shared_width:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_width}"
    if experts.num_dense_layers:
        others = spec.shape.num_layers - experts.num_dense_layers
        yield f"--moe-layer-freq ([0]*{experts.num_dense_layers}+[1]*{others})"
    yield f"--expert-model-parallel-size {choice.layout.expert}"
    yield "--expert-tensor-parallel-size 1"
    yield "--moe-token-dispatcher-type alltoall"
    yield "--moe-grouped-gemm"


def _sharding_flags(choice: Candidate) -> Iterator[str]:
    stage = SHARDING_STAGES[choice.layout.sharding]
    if stage == 0:
        yield "--overlap-grad-reduce"
        return
    yield "--use-distributed-optimizer"
    yield "--overlap-grad-reduce"
    yield "--overlap-param-gather"
    if choice.layout.replicate > 1:
        yield f"--num-distributed-optimizer-instances {choice.layout.replicate}"
    if stage in _FSDP_STRATEGIES:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {_FSDP_STRATEGIES[stage]}"


def _recomputation_flags(choice: Candidate) -> Iterator[str]:
    kind = choice.layout.activation_checkpointing
    if kind == "selective":
        yield "--recompute-granularity selective"
    elif kind == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"


def torchrun_line(choice: Candidate, devices_per_host: int, program: str) -> str:
    """Returns the torchrun command for every host."""
    per_host = min(choice.devices, devices_per_host)
    hosts = -(-choice.devices // per_host)
    where = (
        "--standalone" if hosts == 1 else "--rdzv-backend c10d --rdzv-endpoint $FIRST_HOST:29500"
    )
    return f"torchrun --nnodes {hosts} --nproc-per-node {per_host} {where} {program}"


_SAME_STACK = {"nemo": ("nemo", "megatron-bridge", "megatron-2023")}
"""Frameworks that run Megatron's layers, and so have its flags."""


def write_exports(
    directory: pathlib.Path,
    choice: Candidate,
    spec: SearchSpec,
    hardware: str,
    *,
    is_runnable: bool,
    framework: str = "other",
) -> list[pathlib.Path]:
    """Writes the configs and commands of a layout, and returns the paths.

    If torchtitan does not support the layout, its config is omitted and the commands file states
    the reason. The files of any other `framework` than the one whose constants chose the layout
    say so.
    """
    flags = megatron_flags(choice, spec)
    notes = [f"# {note}" for note in megatron_notes(choice, spec)]
    programs = {
        "torchtitan": "-m torchtitan.train --job.config_file torchtitan.toml",
        "Megatron-LM": "pretrain_gpt.py $(grep -v '^#' megatron.args)",
    }
    if is_runnable:
        programs = {"Paceline": "-m paceline train run.toml --plan plan.json", **programs}
    refusal = torchtitan_refusal(choice, spec)
    if refusal is not None:
        del programs["torchtitan"]
    commands = [
        f"# {name}\n{torchrun_line(choice, spec.devices_per_host, program)}\n"
        for name, program in programs.items()
    ] + ([] if refusal is None else [f"# {refusal}\n"])

    def chosen_for(its: str) -> list[str]:
        if framework in _SAME_STACK.get(its, (its,)):
            return []
        return [
            f"# Chosen with the constants of framework {framework}; plan search --framework {its} "
            "chooses with its own."
        ]

    texts = {
        "plan.json": encode_plan(paceline_plan(choice, spec, hardware)).decode() + "\n",
        "megatron.args": "\n".join([f"# {choice.name}", *chosen_for("nemo"), *notes, *flags])
        + "\n",
        "commands.sh": "\n".join(commands),
    }
    if refusal is None:
        config = torchtitan_config(choice, spec)
        texts["torchtitan.toml"] = "\n".join([*chosen_for("torchtitan"), config])
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths
