"""Training steps of one batch under several layouts, interleaved on the same ranks.

Every layout gets its own model, from the same seed, and the same global batch. A step's time is
that of the slowest rank, its memory that of the fullest.

A trace records some rounds of all layouts, after warm-up. The first rank analyses it. For each
layout it computes how long the ranks computed and how long they only communicated. For each layout
with a pipeline it computes how long the stages were idle in every step, and keeps the step of
median duration in detail, to plot it.

Measured layouts are predicted with the planner's formulas, from a calibration of the same ranks.
"""

import dataclasses
import os
import pathlib
import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.benchmarks.config import LayoutCase, LayoutSweep
from paceline.benchmarks.harness.measure import (
    Numbers,
    measured,
    predicted,
    ratio_metric,
    step_peaks,
)
from paceline.benchmarks.harness.ranks import (
    InterleavedBenchmark,
    MeasuringRanks,
    measure_rounds,
    sweep_ranks,
    trace_case,
)
from paceline.benchmarks.options import LayoutSpec, parse_layout
from paceline.core.errors import UsageError
from paceline.core.ranges import BACKWARD, FORWARD, OPTIMIZER, step_range
from paceline.core.specs import BatchShape
from paceline.core.units import Progress
from paceline.devices.accelerator import now, seconds_between, synchronize
from paceline.devices.named_range import named_range
from paceline.kernels import resolve_implementation
from paceline.models import TransformerLM
from paceline.parallel.dtensor import complete_gradients, local_tensor
from paceline.parallel.mesh.context import ContextShare
from paceline.parallel.mesh.layout import MeshGroups
from paceline.parallel.mesh.tensor import summed_loss, vocabulary_parallel
from paceline.parallel.ranks.placement import is_launched
from paceline.parallel.strategies import without_synchronization
from paceline.parallel.zero.optimizer import state_tensors
from paceline.predict.calibration import TOPOLOGY_FIELDS, Calibration, calibrations, inside_host
from paceline.predict.step import layout_step_time
from paceline.predict.trainer_memory import trainer_memory
from paceline.records import CaseValue, Metric, Record
from paceline.records.kinds import PREDICTION, PREDICTS
from paceline.records.schema import model_case_fields, model_of_case
from paceline.traces.analysis import StepOverlap, analyse_trace, part_samples
from paceline.traces.pipeline import PipelineStep, pipeline_steps
from paceline.training.parallelize import draw_parts, place_model

STEP = "step_time_s"
PEAK = "peak_bytes"
_LEARNING_RATE = 1e-4


class LayoutStep:
    """This rank's part of a model under a layout, with its batch and its optimizer."""

    def __init__(self, case: LayoutCase, spec: LayoutSpec, device: torch.device) -> None:
        layout = spec.layout
        self._device = device
        self._groups = MeshGroups(layout, dist.get_rank(), dist.get_world_size(), device)
        self._num_passes = spec.num_micro_batches(case.sweep.batch_size)
        # Averaging over ranks divides by their number; the scale compensates for it.
        num_tokens = case.sweep.batch_size * case.sweep.context
        self._loss_scale = self._groups.gradient_ranks / num_tokens
        self._range = step_range(spec.text)
        with torch.device("meta"):
            model = TransformerLM(case.shape)
        self._pipeline = place_model(
            model,
            self._groups,
            context_length=case.sweep.context,
            num_micro_batches=self._num_passes,
            loss=self._loss,
        )
        draw_parts(model, seed=0)
        self._model: nn.Module = model
        if self._pipeline is not None:
            self._model = nn.ModuleList(self._pipeline.stages.values())
        self._tokens, self._targets = self._batch(case)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), _LEARNING_RATE, fused=True)

    def _batch(self, case: LayoutCase) -> tuple[Tensor, Tensor]:
        """Returns this rank's sequences or, with context parallelism, its tokens of them."""
        groups = self._groups
        torch.manual_seed(groups.data_rank + 1)
        size = (case.sweep.batch_size // groups.data_ranks, case.sweep.context + 1)
        sequences = torch.randint(case.shape.vocab_size, size, device=self._device)
        tokens, targets = sequences[:, :-1], sequences[:, 1:]
        if groups.context is not None:
            share = ContextShare(groups.context)
            tokens, targets = share.take(tokens), share.take(targets)
        return tokens.contiguous(), targets.contiguous()

    def run(self) -> dict[str, float]:
        """Runs one step on this rank and returns its seconds; the ranks start together."""
        dist.barrier()
        synchronize(self._device)
        with named_range(self._range):
            began = now(self._device)
            self.forward_and_backward()
            self.optimizer_step()
            ended = now(self._device)
            synchronize(self._device)  # In a trace, the step lasts as long as its kernels.
        return {STEP: seconds_between(began, ended)}

    def forward_and_backward(self) -> None:
        """Runs all passes of a step and leaves averaged gradients."""
        with vocabulary_parallel(self._groups.tensor is not None):
            if self._pipeline is not None:
                self._pipeline.forward_and_backward(self._tokens, self._targets)
            else:
                self._run_passes()
        complete_gradients(self._model)

    def _run_passes(self) -> None:
        parts = zip(
            self._tokens.chunk(self._num_passes), self._targets.chunk(self._num_passes), strict=True
        )
        for number, (tokens, targets) in enumerate(parts, start=1):
            if number < self._num_passes:
                with without_synchronization(self._model):
                    self._run_pass(tokens, targets)
            else:
                self._run_pass(tokens, targets)

    def _run_pass(self, tokens: Tensor, targets: Tensor) -> None:
        with named_range(FORWARD):
            loss = self._loss(self._model(tokens), targets)
        with named_range(BACKWARD):
            torch.autograd.backward(loss)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(logits, targets) * self._loss_scale

    def optimizer_step(self) -> None:
        """Updates the parameters and drops the gradients."""
        with named_range(OPTIMIZER):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def peak_bytes(self) -> int:
        """Runs one more step and returns this rank's peak memory."""
        model = self._model
        kept = [*model.parameters(), *model.buffers(), *state_tensors(self._optimizer)]
        local = [local_tensor(tensor) for tensor in kept]
        phases = {"passes": self.forward_and_backward, "optimizer": self.optimizer_step}
        peaks = step_peaks(self._device, resident_tensors=local, phases=phases)
        return max(peaks.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """Results of one layout, identical on all ranks."""

    samples: dict[str, list[float]]
    peak_bytes: int


class LayoutComparison(InterleavedBenchmark):
    """All layouts of one case on one rank."""

    def __init__(self, case: LayoutCase, device: torch.device) -> None:
        self._steps = [LayoutStep(case, spec, device) for spec in case.sweep.specs]
        super().__init__(self._steps, device)

    def results(self) -> list[LayoutResult]:
        """Measures memory, and combines the measurements of all ranks."""
        return [
            LayoutResult(
                samples={name: self.largest(values) for name, values in samples.items()},
                peak_bytes=int(self.largest([float(step.peak_bytes())])[0]),
            )
            for step, samples in zip(self._steps, self.samples, strict=True)
        ]


def layout_records(sweep: LayoutSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every model under all layouts; yields records on rank 0 only."""
    for case in sweep.cases():
        for ranks in _layout_ranks(sweep):
            yield from ranks.on_first(_records_of(case, ranks, on_progress))


def _layout_ranks(sweep: LayoutSweep) -> Iterator[MeasuringRanks]:
    """Yields the launcher's ranks, or starts as many as the layouts have."""
    if not is_launched(os.environ):
        sweep = dataclasses.replace(sweep, world_size=sweep.specs[0].layout.world_size)
    return sweep_ranks(sweep)


def _records_of(case: LayoutCase, ranks: MeasuringRanks, on_progress: Progress) -> Iterator[Record]:
    sweep = case.sweep
    results: list[LayoutResult] | None
    results, outcome, reason = ranks.attempt(
        lambda: measure_rounds(ranks, LayoutComparison, case, sweep, on_progress)
    )
    for index, spec in enumerate(sweep.specs):
        yield measured(
            "layout",
            {
                **layout_case_fields(case, spec, ranks),
                "baseline": sweep.specs[0].text,
                "warmup": sweep.warmup,
                "rounds": sweep.rounds,
            },
            {} if results is None else _numbers(case, results[index], results[0]),
            outcome=outcome,
            reason=reason,
        )


def _numbers(case: LayoutCase, result: LayoutResult, baseline: LayoutResult) -> Numbers:
    numbers: dict[str, Metric | float | list[float]] = {**result.samples, PEAK: result.peak_bytes}
    num_tokens = case.sweep.batch_size * case.sweep.context
    numbers["tokens_per_s"] = num_tokens / Metric.from_samples(result.samples[STEP]).value
    if result is not baseline:
        numbers["step_time_ratio"] = ratio_metric(result.samples[STEP], baseline.samples[STEP])
    return numbers


def layout_case_fields(
    case: LayoutCase, spec: LayoutSpec, ranks: MeasuringRanks
) -> dict[str, CaseValue]:
    """Returns the case fields of the record of a step under a layout."""
    batch = BatchShape(num_sequences=spec.micro_batch, context_length=case.sweep.context)
    device = str(ranks.topology["device"])
    return {
        "layout": spec.text,
        **model_case_fields(case.model, case.shape, batch),
        "batch_size": case.sweep.batch_size,
        "precision": "float32",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "attention": resolve_implementation("auto", device),
        "optimizer": "adamw-fused",
        **ranks.topology,
    }


def trace_layouts(sweep: LayoutSweep, trace: pathlib.Path, on_progress: Progress) -> list[Record]:
    """Traces all layouts; returns the records, on the first rank only."""
    cases = list(sweep.cases())
    if len(cases) != 1:
        raise UsageError("a trace shows one model; give exactly one --model")
    (case,) = cases
    records: list[Record] = []
    for ranks in _layout_ranks(sweep):
        trace_case(ranks, LayoutComparison, case, sweep, trace, on_progress)
        if ranks.is_first:
            records += _records(case, ranks, trace)
    return records


def _records(case: LayoutCase, ranks: MeasuringRanks, trace: pathlib.Path) -> Iterator[Record]:
    analysis = analyse_trace(trace)
    for spec in case.sweep.specs:
        layout = spec.layout
        fields = layout_case_fields(case, spec, ranks)
        how = {"warmup": case.sweep.warmup, "rounds": case.sweep.rounds}
        steps = [step for step in analysis.steps if step.label == spec.text]
        yield measured("layout_trace", {**fields, **how}, _shares(steps))
        if layout.pipeline == 1:
            continue
        # Stages are outermost: ranks of one pipeline are world_size / pipeline apart.
        own = range(0, layout.world_size, layout.world_size // layout.pipeline)
        yield measured("pipeline", {**fields, **how}, _schedule_numbers(pipeline_steps(steps, own)))
        passes = layout.pipeline_interleave * spec.num_micro_batches(case.sweep.batch_size)
        yield predicted("pipeline", fields, {"bubble": (layout.pipeline - 1) / passes})


def _shares(steps: Sequence[StepOverlap]) -> dict[str, list[float]]:
    """Returns the parts of each step of a layout, in seconds, averaged over ranks."""
    by_rank: dict[int, list[StepOverlap]] = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step)
    samples = [part_samples(of_rank) for of_rank in by_rank.values()]
    return {
        name: [statistics.mean(step) for step in zip(*(own[name] for own in samples), strict=True)]
        for name in samples[0]
    }


def _schedule_numbers(steps: Sequence[PipelineStep]) -> dict[str, list[float]]:
    numbers = {
        "duration_s": [step.duration_s for step in steps],
        "work_s": [step.work_s / len(step.ranks) for step in steps],
        "idle": [step.idle for step in steps],
        "bubble": [step.bubble for step in steps],
        "order_bubble": [step.order_bubble for step in steps],
        "imbalance": [step.imbalance for step in steps],
        "messages": [step.messages for step in steps],
    }
    drawn = sorted(steps, key=lambda step: step.duration_s)[len(steps) // 2]
    for phase in dict.fromkeys(piece.what.phase for piece in drawn.work):
        pieces = [piece for piece in drawn.work if piece.what.phase == phase]
        numbers |= {
            f"{phase}_start_s": [piece.start_s for piece in pieces],
            f"{phase}_end_s": [piece.end_s for piece in pieces],
            f"{phase}_rank": [float(piece.rank) for piece in pieces],
            f"{phase}_stage": [float(piece.what.stage) for piece in pieces],
        }
        if phase != "loss":
            numbers[f"{phase}_micro_batch"] = [
                float(piece.what.micro_batch or 0) for piece in pieces
            ]
    return numbers


_METHOD = ("baseline", "warmup", "rounds")


def layout_predictions(
    records: Sequence[Record], calibration: Iterable[Record]
) -> Iterator[Record]:
    """Yields the prediction for every measured layout: time by term, and memory.

    `calibration` has records of the same ranks; for ranks on several hosts, also of the ranks of
    one host. Older records of a zero-bubble schedule are skipped: neither trainer nor planner has
    it.
    """
    known = calibrations(calibration)
    for record in records:
        if record.kind == "layout" and record.outcome == "ok" and not _is_zero_bubble(record):
            calibrated = _matching(known, record)
            inside = inside_host(known, calibrated)
            case = {name: value for name, value in record.case.items() if name not in _METHOD}
            yield Record(
                kind=PREDICTION,
                case={PREDICTS: "layout", **case},
                environment=record.environment,
                metrics=_predict(record, calibrated, inside),
                outcome="ok",
            )


def _is_zero_bubble(record: Record) -> bool:
    return "zb=1" in str(record.case["layout"]).split(",")


def _matching(known: Sequence[Calibration], record: Record) -> Calibration:
    wanted = {field: record.case.get(field) for field in TOPOLOGY_FIELDS}
    for calibration in known:
        if all(calibration.topology.get(field) == value for field, value in wanted.items()):
            return calibration
    text = ", ".join(f"{field} {value}" for field, value in wanted.items() if value is not None)
    raise UsageError(
        f"--calibration: no record measured with {text}; run paceline calibrate on these ranks"
    )


def _predict(
    record: Record, calibration: Calibration, inside: Calibration | None
) -> dict[str, Metric]:
    case = record.case
    written = parse_layout(str(case["layout"]))
    context_length, batch_size = int(str(case["context"])), int(str(case["batch_size"]))
    shape = model_of_case(case)
    assert shape is not None  # The kind requires the fields of a model.
    shape = dataclasses.replace(shape, max_context_length=context_length)
    batch = BatchShape(
        num_sequences=written.micro_batch,
        context_length=context_length,
        accumulation_steps=written.num_micro_batches(batch_size),
    )
    time = layout_step_time(written.layout, shape, batch, calibration, inside)
    values = {
        "step_time_s": time.total_s,
        "peak_bytes": trainer_memory(written.layout, shape, batch).total,
        **{name: value for name, value in vars(time).items() if np.any(value)},
    }
    return {name: Metric(value=float(np.ravel(value)[0])) for name, value in values.items()}
