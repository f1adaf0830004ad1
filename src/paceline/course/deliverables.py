"""All course deliverables in order: the questions, and the functions that answer them.

The questions paraphrase the hand-outs. Each part has a function that turns records into report
blocks, and the kind of record that the function needs.
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


@dataclasses.dataclass(frozen=True)
class Part:
    """One question of a deliverable."""

    title: str
    question: str
    answer: Callable[[Evidence], tuple[Block, ...]]
    kind: str | None = None
    """The kind of record that the answer needs; None if it is calculated."""


@dataclasses.dataclass(frozen=True)
class Deliverable:
    """One problem of the courses."""

    name: str
    """Name in the course hand-outs."""
    title: str
    parts: tuple[Part, ...]


def _deliverable(name: str, title: str, *parts: Part) -> Deliverable:
    return Deliverable(name, title, parts)


DELIVERABLES: tuple[Deliverable, ...] = (
    _deliverable(
        "benchmarking_script",
        "Time of a training step",
        Part(
            "By model",
            "How long do forward, backward and optimizer take for each model size, and how "
            "much do repeated steps differ?",
            step.answer_sizes,
            "step",
        ),
        Part(
            "Warm-up",
            "How do mean and standard deviation change without warm-up steps, or with one or two?",
            step.answer_warmup,
            "step",
        ),
    ),
    _deliverable(
        "nsys_profile",
        "Where a step's time goes",
        Part(
            "Operators",
            "Does a trace agree with the stopwatch? Which operator takes longest in forward "
            "and in backward, and how often is it called? What else takes time, how does the "
            "share of matmuls change in a whole step, and how does softmax compare with the "
            "matmuls of attention?",
            profile.answer_profile,
            "memory_timeline",
        ),
    ),
    _deliverable(
        "mixed_precision_accumulation",
        "Sums in low precision",
        Part(
            "Four sums",
            "What is 0.01 added a thousand times, with sum and term in fp32 or fp16, and why?",
            arithmetic.calculate_sums,
        ),
    ),
    _deliverable(
        "benchmarking_mixed_precision",
        "Mixed precision",
        Part(
            "Dtypes under autocast",
            "Which dtype do parameters, activations, logits, loss and gradients have, and why "
            "is layer norm treated differently?",
            arithmetic.explain_autocast,
        ),
        Part(
            "Speed-up",
            "How much faster are forward and backward in bf16, by model?",
            step.answer_precision,
            "step",
        ),
    ),
    _deliverable(
        "memory_profiling",
        "Memory of a step",
        Part(
            "Timelines and peaks",
            "What does memory look like over a forward pass and over a training step, how does "
            "the peak depend on the context and on the dtype, and what is the largest "
            "allocation?",
            profile.answer_memory,
            "memory_timeline",
        ),
        Part(
            "The 2.7B model",
            "How large is a tensor of the residual stream, and how much memory should a training "
            "step of the 2.7B model take at each context?",
            profile.calculate_memory,
        ),
    ),
    _deliverable(
        "pytorch_attention",
        "Attention that stores its scores",
        Part(
            "Time and memory by length",
            "How do the times of forward and backward and the memory before backward grow with "
            "the sequence length, and at which length does memory run out?",
            attention.answer_naive,
            "attention",
        ),
        Part(
            "A configuration that runs out of memory",
            "What is the memory used for, and how can most of it be avoided?",
            attention.calculate_naive,
        ),
    ),
    _deliverable(
        "torch_compile",
        "Compilation",
        Part(
            "Attention",
            "How much faster is compiled attention?",
            attention.answer_compiled_attention,
            "attention",
        ),
        Part(
            "The whole model",
            "How much faster is the compiled model in forward, and in the whole step?",
            step.answer_compiled_step,
            "step",
        ),
    ),
    _deliverable(
        "flash_forward, flash_backward",
        "FlashAttention-2",
        Part(
            "Tiles",
            "What do forward and backward compute tile by tile, and what do they save?",
            attention.explain_tiles,
        ),
        Part(
            "Triton kernels",
            "How many registers, how much shared memory and what occupancy do the kernels have?",
            attention.answer_kernels,
            "kernel",
        ),
    ),
    _deliverable(
        "flash_benchmarking",
        "FlashAttention-2 against plain attention",
        Part(
            "Implementations side by side",
            "How long do forward and backward of each implementation take, with a causal mask and "
            "batch 1, by length, head dimension and dtype?",
            attention.answer_flash,
            "attention",
        ),
    ),
    _deliverable(
        "distributed_communication_single_node",
        "All-reduce",
        Part(
            "Throughput by size and ranks",
            "How long does an all-reduce of 1 MB to 1 GB take on 2, 4 and 6 ranks, and how "
            "close does it come to the rate of the link?",
            collectives.answer_all_reduce,
            "comm",
        ),
    ),
    _deliverable(
        "naive_ddp",
        "Data parallelism, one all-reduce per parameter",
        Part(
            "Equality",
            "Does training on several ranks give the same weights as training in one process?",
            strategies.explain_equality,
        ),
        Part(
            "Cost",
            "How long is a step, and how much of it is communication?",
            strategies.answer_naive,
            "ddp",
        ),
    ),
    _deliverable(
        "minimal_ddp_flat",
        "One all-reduce for all gradients",
        Part(
            "Cost",
            "How does one all-reduce of all gradients compare with one per parameter?",
            strategies.answer_flat,
            "ddp",
        ),
    ),
    _deliverable(
        "ddp_overlap_individual_parameters, ddp_overlap_bucketed",
        "Communication during backward",
        Part(
            "Individual parameters and buckets",
            "How long is a step when parameters, or buckets of 1 to 1000 MiB, are sent as soon "
            "as their gradients are ready, and does the overlap model predict it?",
            strategies.answer_overlap,
            "ddp",
        ),
        Part(
            "Traces with and without overlap",
            "When does a step communicate: during backward, or after it?",
            strategies.answer_traces,
            "timeline",
        ),
    ),
    _deliverable(
        "ddp_bucketed_benchmarking (equations)",
        "DDP overhead equation",
        Part(
            "Overhead and best bucket",
            "There are s bytes of gradients, w bytes per second, o seconds per call, and n "
            "buckets; computing a bucket takes as long as sending it. How long does "
            "communication go on after backward, and which bucket size minimises that time?",
            strategies.calculate_overhead,
        ),
    ),
    _deliverable(
        "communication_accounting",
        "Accounting of a model too large for any device",
        Part(
            "Memory, sharding, and when compute hides communication",
            "How much memory do the states and activations of xxl take, over how many devices "
            "must they be sharded, and from which batch size on is forward compute-bound?",
            arithmetic.calculate_accounting,
        ),
    ),
    _deliverable(
        "optimizer_state_sharding",
        "Sharding the optimizer state (ZeRO)",
        Part(
            "Memory at three instants",
            "How much memory does a rank hold after initialisation, and before and after the "
            "optimizer step, with and without sharding, and what is it used for?",
            sharding.answer_memory,
            "optimizer",
        ),
        Part("Time", "How does sharding change step time?", sharding.answer_time, "optimizer"),
        Part(
            "Accounting, and ZeRO stage 1",
            "How much memory do the states of xl take, and how does this sharding differ from "
            "ZeRO stage 1 in memory and in communication volume?",
            sharding.calculate_states,
        ),
    ),
    _deliverable(
        "chinchilla_isoflops",
        "Scaling laws",
        Part(
            "The best model and data for a budget",
            "From the losses of runs at equal compute, which model size and how many tokens "
            "are best at 1e23 and at 1e24 FLOPs?",
            scaling.answer_scaling,
        ),
    ),
)
