"""A layout with its predicted step time, memory and bottleneck."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from paceline.core.plan import CHECKPOINTINGS, SHARDINGS, Estimate, ParallelLayout
from paceline.core.specs import BatchShape
from paceline.planner.search.candidates import Candidates
from paceline.planner.search.spec import Costs, SearchQuestion
from paceline.predict.cost.experts import model_flops_per_token
from paceline.predict.cost.layouts import SHARDING_STAGES
from paceline.predict.cost.memory import layout_memory
from paceline.predict.cost.step_time import step_time

BOUNDS = {
    "compute_s": "compute",
    "memory_s": "memory bandwidth",
    "optimizer_s": "memory bandwidth",
    "launch_s": "kernel launches",
    "tensor_s": "tensor communication",
    "context_s": "context communication",
    "expert_s": "expert communication",
    "stages_s": "pipeline communication",
    "bubble_s": "pipeline bubble",
    "imbalance_s": "stage imbalance",
    "data_s": "data-parallel communication",
    "engine_s": "calls of torch's engine",
    "fixed_s": "fixed costs of a step",
    "measured_s": "what runs of such sizes took beyond the formulas",
}
"""Display name of each step-time term."""
_COMMUNICATION = ("tensor_s", "context_s", "expert_s", "stages_s", "data_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout with its predictions."""

    layout: ParallelLayout
    batch: BatchShape
    """Micro-batch and gradient accumulation of one data-parallel rank."""
    devices: int
    """Number of held devices that the layout uses."""
    step_time_s: Estimate
    terms_s: Mapping[str, float]
    """Seconds of a step by term. Their sum is the step time."""
    memory_bytes: Mapping[str, float]
    """Peak memory of one device by part: states, activations, working, framework."""
    capacity_bytes: float
    tokens_per_s: float
    """Throughput of all devices together."""
    outside: tuple[str, ...]
    """Features of the layout that are outside the range of the measured runs."""
    mfu: float | None
    """Model FLOPs, with full attention scores, over the stated peak of the devices used."""

    @property
    def peak_bytes(self) -> float:
        """Peak memory of one device."""
        return sum(self.memory_bytes.values())

    @property
    def headroom(self) -> float:
        """Fraction of memory that stays free at the peak."""
        return 1 - self.peak_bytes / self.capacity_bytes

    @property
    def bubble_share(self) -> float:
        """Fraction of the step in which pipeline stages wait for each other."""
        idle = self.terms_s.get("bubble_s", 0.0) + self.terms_s.get("imbalance_s", 0.0)
        return idle / self.step_time_s.value

    @property
    def exposed_share(self) -> float:
        """Fraction of the step that is exposed communication."""
        return sum(self.terms_s.get(name, 0.0) for name in _COMMUNICATION) / self.step_time_s.value

    @property
    def bound(self) -> str:
        """Name of the bottleneck that accounts for the largest part of the step."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by bottleneck, largest first."""
        parts: dict[str, float] = {}
        for term, seconds in self.terms_s.items():
            name = BOUNDS.get(term, term.removesuffix("_s"))
            parts[name] = parts.get(name, 0.0) + seconds
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    @property
    def name(self) -> str:
        """Short name of the layout."""
        return layout_name(self.layout, self.batch)


def layout_name(layout: ParallelLayout, batch: BatchShape) -> str:
    """Returns a layout's short name, such as ``dp 8 (ZeRO-1) tp 8+sp pp 4x2 mb 1``."""
    stage = SHARDING_STAGES[layout.sharding]
    data = f"dp {layout.data_parallel}"
    if stage:
        replicas = f", {layout.replicate} replicas" if layout.replicate > 1 else ""
        data += f" (ZeRO-{stage}{replicas})"
    parts = [data]
    if layout.tensor > 1:
        parts.append(f"tp {layout.tensor}{'+sp' if layout.sequence_parallel else ''}")
    if layout.context > 1:
        parts.append(f"cp {layout.context}")
    if layout.expert > 1:
        parts.append(f"ep {layout.expert}")
    if layout.pipeline > 1:
        interleave = layout.pipeline_interleave
        parts.append(f"pp {layout.pipeline}{f'x{interleave}' if interleave > 1 else ''}")
    parts.append(f"mb {batch.num_sequences}")
    if layout.activation_checkpointing != "none":
        parts.append(f"{layout.activation_checkpointing} recompute")
    return " ".join(parts)


def choices(
    candidates: Candidates, question: SearchQuestion, costs: Costs, peak_flops: float | None = None
) -> list[Choice]:
    """Returns a choice with all terms for each candidate.

    Args:
        candidates: The layouts.
        question: The search question.
        costs: Achieved rates of devices and links.
        peak_flops: Stated peak FLOP/s of a device, for MFU.
    """
    if not len(candidates):
        return []
    size = len(candidates)
    layouts = candidates.layouts
    workload = question.workload(candidates.micro_batch, candidates.num_micro_batches)
    time = step_time(layouts, workload, costs.cluster, hidden=costs.hidden)
    memory = layout_memory(layouts, workload)
    low, high = costs.interval(layouts, workload)

    def spread(values: object) -> list[float]:
        return [float(value) for value in np.broadcast_to(np.asarray(values, dtype=float), size)]

    total, lows, highs = spread(time.total_s), spread(low), spread(high)
    terms = {field.name: spread(getattr(time, field.name)) for field in dataclasses.fields(time)}
    parts = {
        "states": spread(memory.states.total),
        "activations": spread(memory.activations),
        "working": spread(memory.working),
        "framework": spread(memory.framework),
    }
    per_token = model_flops_per_token(question.shape, question.experts, question.context_length)
    flops = per_token * question.tokens_per_step
    devices = candidates.num_devices
    found = []
    for place in range(size):
        seconds = total[place]
        used = int(devices[place])
        one = candidates.take(np.array([place]))
        found.append(
            Choice(
                layout=layout_at(candidates, place),
                batch=BatchShape(
                    num_sequences=int(candidates.micro_batch[place]),
                    context_length=question.context_length,
                    accumulation_steps=int(candidates.num_micro_batches[place]),
                ),
                devices=used,
                step_time_s=Estimate(
                    value=seconds, low=seconds * lows[place], high=seconds * highs[place]
                ),
                terms_s={name: values[place] for name, values in terms.items()},
                memory_bytes={name: values[place] for name, values in parts.items()},
                capacity_bytes=question.memory_bytes,
                tokens_per_s=question.tokens_per_step / seconds,
                outside=costs.outside(
                    one.layouts, question.workload(one.micro_batch, one.num_micro_batches)
                ),
                mfu=None if peak_flops is None else flops / (seconds * used * peak_flops),
            )
        )
    return found


def layout_at(candidates: Candidates, place: int) -> ParallelLayout:
    """Returns the layout of the candidate at an index."""
    layouts = candidates.layouts
    return ParallelLayout(
        replicate=int(layouts.replicate[place]),
        shard=int(layouts.shard[place]),
        tensor=int(layouts.tensor[place]),
        pipeline=int(layouts.pipeline[place]),
        context=int(layouts.context[place]),
        expert=int(layouts.expert[place]) if np.ndim(layouts.expert) else 1,
        sharding=SHARDINGS[int(layouts.stage[place])],
        sequence_parallel=bool(layouts.sequence_parallel[place]),
        pipeline_interleave=int(layouts.pipeline_interleave[place]),
        activation_checkpointing=CHECKPOINTINGS[int(layouts.checkpointing[place])],
    )
