"""One layout that was found: what a step of it takes, holds, and is bound by."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from paceline.core.plan import CHECKPOINTINGS, SHARDINGS, Estimate, ParallelLayout
from paceline.core.specs import BatchShape
from paceline.planner.cost.experts import model_flops_per_token
from paceline.planner.cost.layouts import SHARDING_STAGES
from paceline.planner.cost.memory import layout_memory
from paceline.planner.cost.step_time import step_time
from paceline.planner.search.candidates import Candidates
from paceline.planner.search.costs import Costs
from paceline.planner.search.question import SearchQuestion

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
"""What each term of a step's time is called."""
_COMMUNICATION = ("tensor_s", "context_s", "expert_s", "stages_s", "data_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout with its predictions."""

    layout: ParallelLayout
    batch: BatchShape
    """Of one data-parallel rank: micro-batch and accumulation."""
    devices: int
    """Devices that the layout uses, of those that are held."""
    step_time_s: Estimate
    terms_s: Mapping[str, float]
    """Seconds of a step by term, which add up to the step."""
    memory_bytes: Mapping[str, float]
    """What one device holds at the peak: states, activations, working."""
    capacity_bytes: float
    tokens_per_s: float
    """Of all devices together."""
    outside: tuple[str, ...]
    """In what the layout lies outside of the runs that were measured."""
    mfu: float | None
    """Model FLOPs, all attention scores counted, over the stated peak of the devices used."""

    @property
    def peak_bytes(self) -> float:
        """What one device holds at the peak."""
        return sum(self.memory_bytes.values())

    @property
    def headroom(self) -> float:
        """Share of the memory that stays free."""
        return 1 - self.peak_bytes / self.capacity_bytes

    @property
    def bubble_share(self) -> float:
        """Share of the step in which stages wait for each other."""
        idle = self.terms_s.get("bubble_s", 0.0) + self.terms_s.get("imbalance_s", 0.0)
        return idle / self.step_time_s.value

    @property
    def exposed_share(self) -> float:
        """Share of the step in which nothing is computed because something is sent."""
        return sum(self.terms_s.get(name, 0.0) for name in _COMMUNICATION) / self.step_time_s.value

    @property
    def bound(self) -> str:
        """The largest part of the step, by what it is bound by."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by what bounds them, the largest first."""
        parts: dict[str, float] = {}
        for term, seconds in self.terms_s.items():
            name = BOUNDS.get(term, term.removesuffix("_s"))
            parts[name] = parts.get(name, 0.0) + seconds
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    @property
    def name(self) -> str:
        """The axes that are larger than one, in short."""
        return layout_name(self.layout, self.batch)


def layout_name(layout: ParallelLayout, batch: BatchShape) -> str:
    """Returns a layout in short, such as ``dp 8 (shard 8, ZeRO-1) tp 8+sp pp 4x2 mb 1``."""
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
    """Evaluates candidates one by one, with all terms.

    Args:
        candidates: The layouts.
        question: What they are for.
        costs: What devices and links reach.
        peak_flops: Stated FLOP/s of a device, for MFU.
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
    """Returns one of many layouts."""
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
