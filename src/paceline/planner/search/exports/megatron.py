"""Exports a layout as flags of Megatron-LM's pretrain_gpt.py.

ZeRO-1 maps to Megatron's distributed optimizer, ZeRO-2 and 3 to Megatron FSDP. The distributed
optimizer has one instance per replica, and shards states over data and context ranks together.
Differences between Megatron and the layout are returned as notes.

Whole experts are distributed over expert ranks (an expert tensor size of 1), with all-to-all
dispatch. A shape does not include the widths of latent attention, so the user must add those flags.
"""

from collections.abc import Iterator

from paceline.core.specs import Experts, ModelShape
from paceline.planner.cost.layouts import SHARDING_STAGES
from paceline.planner.search.choice import Choice
from paceline.planner.search.question import SearchQuestion

_FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_flags(choice: Choice, question: SearchQuestion) -> list[str]:
    """Returns the flags, one flag with its value per entry."""
    return [
        *_model_flags(question),
        *_batch_flags(choice, question),
        *_mesh_flags(choice, question.shape.num_layers),
        *_expert_flags(choice, question),
        *_sharding_flags(choice),
        *_recomputation_flags(choice),
    ]


def megatron_notes(choice: Choice, question: SearchQuestion) -> tuple[str, ...]:
    """Returns notes to read before using the flags."""
    notes = ["data, learning rate and checkpoints are yours to add"]
    vocab, tensor = question.shape.vocab_size, choice.layout.tensor
    if vocab % (128 * tensor):
        notes.append(f"Megatron pads the vocabulary of {vocab:,} to a multiple of {128 * tensor}")
    if _has_latent_attention(question.experts):
        notes.append(
            "latent attention: add --multi-latent-attention and its ranks and head widths "
            "(--q-lora-rank, --kv-lora-rank, --qk-head-dim, --qk-pos-emb-head-dim, --v-head-dim)"
        )
    if question.experts is not None:
        notes.append("how the router scores and balances is Megatron's default: see --moe-router-*")
    return tuple(notes)


def _has_latent_attention(experts: Experts | None) -> bool:
    return experts is not None and experts.attention_parameters is not None


def _model_flags(question: SearchQuestion) -> Iterator[str]:
    shape, experts, context_length = question.shape, question.experts, question.context_length
    yield f"--num-layers {shape.num_layers}"
    yield f"--hidden-size {shape.d_model}"
    width = shape.d_ff if experts is None else experts.dense_width or experts.width
    yield f"--ffn-hidden-size {width}"
    yield f"--num-attention-heads {shape.num_heads}"
    if not _has_latent_attention(experts):
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


def _batch_flags(choice: Choice, question: SearchQuestion) -> Iterator[str]:
    yield f"--micro-batch-size {choice.batch.num_sequences}"
    yield f"--global-batch-size {question.global_batch}"
    if question.precision.compute == "bfloat16":
        yield "--bf16"
    elif question.precision.compute == "float16":
        yield "--fp16"
    if question.float8_matmuls:
        yield "--fp8-format hybrid"


def _mesh_flags(choice: Choice, num_layers: int) -> Iterator[str]:
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


def _expert_flags(choice: Choice, question: SearchQuestion) -> Iterator[str]:
    experts = question.experts
    if experts is None:
        return
    yield f"--num-experts {experts.num_experts}"
    yield f"--moe-router-topk {experts.experts_per_token}"
    yield f"--moe-ffn-hidden-size {experts.width}"
    if experts.shared_width:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_width}"
    if experts.num_dense_layers:
        others = question.shape.num_layers - experts.num_dense_layers
        yield f"--moe-layer-freq ([0]*{experts.num_dense_layers}+[1]*{others})"
    yield f"--expert-model-parallel-size {choice.layout.expert}"
    yield "--expert-tensor-parallel-size 1"
    yield "--moe-token-dispatcher-type alltoall"
    yield "--moe-grouped-gemm"


def _sharding_flags(choice: Choice) -> Iterator[str]:
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


def _recomputation_flags(choice: Choice) -> Iterator[str]:
    kind = choice.layout.activation_checkpointing
    if kind == "selective":
        yield "--recompute-granularity selective"
    elif kind == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
