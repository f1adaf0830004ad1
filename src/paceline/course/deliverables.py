"""Every deliverable of the courses in their order: what is asked, what answers and measures it.

The questions are those of the hand-outs in our own words; each part has a function from records to
blocks, and the command whose records that function needs.
"""

import dataclasses
from collections.abc import Callable

from paceline.course.answers import (
    arithmetic,
    attention,
    collectives,
    profile,
    scaling,
    sharding,
    step,
    strategies,
)
from paceline.reports.document.model import Block
from paceline.reports.evidence.groups import Evidence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One question of a deliverable."""

    title: str
    question: str
    answer: Callable[[Evidence], tuple[Block, ...]]
    commands: tuple[str, ...] = ()
    """What measures it; none for what is calculated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deliverable:
    """One problem of the courses."""

    name: str
    """As the courses call it."""
    title: str
    parts: tuple[Part, ...]


_PROFILE = "paceline profile step --model small --context 256 --attention naive"
_LAB = "paceline lab run --hosts 2 --rate 2gbit -- "
# Virtual hosts share a GPU, which collectives on GPUs refuse; so they are for CPUs.
_COMPARED = (
    f"{_LAB}paceline bench ddp --device cpu --model bytes-34M --batch 5",
    "paceline bench ddp --device cuda --model medium",
)
_STRATEGIES = tuple(
    f"{compared} --strategies torch_ddp none naive flat overlapped bucketed --bucket-size-mb 25"
    for compared in _COMPARED
)
_BUCKETS = tuple(
    f"{compared} --strategies torch_ddp bucketed --bucket-size-mb 25 1 10 100 1000"
    for compared in _COMPARED
)

DELIVERABLES: tuple[Deliverable, ...] = (
    Deliverable(
        name="benchmarking_script",
        title="Time of a training step",
        parts=(
            Part(
                title="By model",
                question="How long do forward, backward and optimizer take for each model size, "
                "and how much do repeated steps differ?",
                answer=step.answer_sizes,
                commands=(
                    "paceline bench step --model small medium large xl 2.7B --warmup 5 --steps 10",
                ),
            ),
            Part(
                title="Warm-up",
                question="What happens to mean and deviation without warm-up steps, or with one or "
                "two?",
                answer=step.answer_warmup,
                commands=("paceline bench step --model small --warmup 0 1 2 5 --steps 10",),
            ),
        ),
    ),
    Deliverable(
        name="nsys_profile",
        title="Where a step's time goes",
        parts=(
            Part(
                title="Operators",
                question="Does a trace agree with the stopwatch? Which operator takes longest in "
                "forward and in backward, and how often is it called? What else takes time, how "
                "does the share of products change in a whole step, and how does softmax compare "
                "with the products of attention?",
                answer=profile.answer_profile,
                commands=(f"{_PROFILE} --phase forward --out profile", f"{_PROFILE} --out profile"),
            ),
        ),
    ),
    Deliverable(
        name="mixed_precision_accumulation",
        title="Sums in low precision",
        parts=(
            Part(
                title="Four sums",
                question="What is 0.01 added a thousand times, with sum and term in float32 or "
                "float16, and why?",
                answer=arithmetic.calculate_sums,
            ),
        ),
    ),
    Deliverable(
        name="benchmarking_mixed_precision",
        title="Mixed precision",
        parts=(
            Part(
                title="Formats under autocast",
                question="Which format do parameters, activations, logits, loss and gradients "
                "have, and why is layer norm treated differently?",
                answer=arithmetic.explain_autocast,
            ),
            Part(
                title="What it gains",
                question="How much faster are forward and backward in sixteen bits, by model?",
                answer=step.answer_precision,
                commands=("paceline bench step --model small medium --precision float32 bfloat16",),
            ),
        ),
    ),
    Deliverable(
        name="memory_profiling",
        title="Memory of a step",
        parts=(
            Part(
                title="Timelines and peaks",
                question="What does memory look like over a forward pass and over a training step, "
                "how does the peak depend on the context and on the format, and what is the "
                "largest allocation?",
                answer=profile.answer_memory,
                commands=(
                    f"{_PROFILE} --phase forward --out profile",
                    f"{_PROFILE} --out profile",
                    f"{_PROFILE} --precision bfloat16 --out profile",
                ),
            ),
            Part(
                title="The 2.7B model",
                question="How large is a tensor of the residual stream, and what should a training "
                "step of the 2.7B model take at each context?",
                answer=profile.calculate_memory,
            ),
        ),
    ),
    Deliverable(
        name="pytorch_attention",
        title="Attention that stores its scores",
        parts=(
            Part(
                title="Time and memory by length",
                question="How do both passes and the memory before backward grow with the "
                "sequence, and where does it run out?",
                answer=attention.answer_naive,
                commands=("paceline bench attention",),
            ),
            Part(
                title="A configuration that runs out",
                question="What does the memory consist of, and what would remove it?",
                answer=attention.calculate_naive,
            ),
        ),
    ),
    Deliverable(
        name="torch_compile",
        title="Compilation",
        parts=(
            Part(
                title="Attention",
                question="What does compiling attention gain?",
                answer=attention.answer_compiled_attention,
                commands=("paceline bench attention", "paceline bench attention --compile"),
            ),
            Part(
                title="The whole model",
                question="What does compiling the model gain in forward, and in the whole step?",
                answer=step.answer_compiled_step,
                commands=(
                    "paceline bench step --model small",
                    "paceline bench step --model small --compile",
                ),
            ),
        ),
    ),
    Deliverable(
        name="flash_forward, flash_backward",
        title="FlashAttention-2",
        parts=(
            Part(
                title="Tiles",
                question="What do forward and backward compute tile by tile, and what do they "
                "keep?",
                answer=attention.explain_tiles,
            ),
            Part(
                title="Triton kernels",
                question="What do the kernels take of a GPU?",
                answer=attention.answer_kernels,
                commands=("paceline bench kernels",),
            ),
        ),
    ),
    Deliverable(
        name="flash_benchmarking",
        title="FlashAttention-2 against plain attention",
        parts=(
            Part(
                title="Implementations side by side",
                question="How do forward, backward and both compare, causal, batch 1, by length, "
                "width and format?",
                answer=attention.answer_flash,
                commands=(
                    "paceline bench attention --implementation naive tiled sdpa triton --batch 1 "
                    "--causal --dtype float32 bfloat16 --context 128 1024 4096 16384 65536",
                ),
            ),
        ),
    ),
    Deliverable(
        name="distributed_communication_single_node",
        title="All-reduce",
        parts=(
            Part(
                title="Throughput by size and ranks",
                question="How long does an all-reduce of 1 MB to 1 GB take on 2, 4 and 6 ranks, "
                "and how near is it to what the line could carry?",
                answer=collectives.answer_all_reduce,
                commands=(
                    "paceline bench comm --sizes 1MB 10MB 100MB 1GB --world-sizes 2 4 6",
                    "paceline lab run --hosts 2 --rate 1gbit -- paceline bench comm --device cpu "
                    "--sizes 1MB 10MB 100MB",
                ),
            ),
        ),
    ),
    Deliverable(
        name="naive_ddp",
        title="Data parallelism, one message per parameter",
        parts=(
            Part(
                title="Equality",
                question="Does training on several ranks give the weights of one process?",
                answer=strategies.explain_equality,
            ),
            Part(
                title="Cost",
                question="How long is a step, and how much of it is communication?",
                answer=strategies.answer_naive,
                commands=_STRATEGIES,
            ),
        ),
    ),
    Deliverable(
        name="minimal_ddp_flat",
        title="One message for all gradients",
        parts=(
            Part(
                title="Cost",
                question="How does one message of all gradients compare with one per parameter?",
                answer=strategies.answer_flat,
                commands=_STRATEGIES,
            ),
        ),
    ),
    Deliverable(
        name="ddp_overlap_individual_parameters, ddp_overlap_bucketed",
        title="Communication during backward",
        parts=(
            Part(
                title="Individual parameters and buckets",
                question="How long is a step when parameters, or buckets of 1 to 1000 MiB, are "
                "sent as soon as they are ready, and is that what the model expects?",
                answer=strategies.answer_overlap,
                commands=(*_STRATEGIES, *_BUCKETS),
            ),
            Part(
                title="Traces with and without overlap",
                question="Where is communication in a step, beside what or after what?",
                answer=strategies.answer_traces,
                commands=(
                    f"{_LAB}paceline profile ddp --device cpu --model bytes-34M --out profile",
                    "paceline profile ddp --device cuda --model medium --out profile",
                ),
            ),
        ),
    ),
    Deliverable(
        name="ddp_bucketed_benchmarking (equations)",
        title="DDP overhead equation",
        parts=(
            Part(
                title="Overhead and best bucket",
                question="With s bytes, w bytes per second, o seconds per call and n buckets whose "
                "computing takes as long as their sending, what time is left after backward, and "
                "which bucket size makes it least?",
                answer=strategies.calculate_overhead,
            ),
        ),
    ),
    Deliverable(
        name="communication_accounting",
        title="Accounting of a model too large for any device",
        parts=(
            Part(
                title="Memory, sharding, and when computing hides communication",
                question="What do states and activations of xxl take, over how many devices must "
                "they be divided, and from which batch on is forward bound by computing?",
                answer=arithmetic.calculate_accounting,
            ),
        ),
    ),
    Deliverable(
        name="optimizer_state_sharding",
        title="Dividing the optimizer's state",
        parts=(
            Part(
                title="Memory at three instants",
                question="What does a rank hold after initialisation, before and after the "
                "optimizer's step, with and without sharding, and what is it for?",
                answer=sharding.answer_memory,
                commands=("paceline bench memory --model small",),
            ),
            Part(
                title="Time",
                question="What does sharding do to the time of a step?",
                answer=sharding.answer_time,
                commands=("paceline bench memory --model small",),
            ),
            Part(
                title="Accounting, and ZeRO stage 1",
                question="What do the states of xl take, and how does this differ from ZeRO stage "
                "1 in memory and in what is sent?",
                answer=sharding.calculate_states,
            ),
        ),
    ),
    Deliverable(
        name="chinchilla_isoflops",
        title="Scaling laws",
        parts=(
            Part(
                title="The best model and data for a budget",
                question="From the losses of runs at equal compute, which model size and how many "
                "tokens are best at 1e23 and at 1e24 FLOPs?",
                answer=scaling.answer_scaling,
            ),
        ),
    ),
)
