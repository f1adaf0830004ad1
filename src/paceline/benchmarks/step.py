"""One training step, timed phase by phase.

Phases: forward runs model and loss without recording gradients; forward-backward records
them and runs backward; train also runs AdamW and clears the gradients. Every phase ends
only when the device is idle, so the laps add up to the step.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.accounting.counts import AttentionConvention, flops_per_token
from paceline.accounting.memory.step import minimum_step_bytes
from paceline.benchmarks.config import StepCase, StepSweep
from paceline.benchmarks.harness.isolation import Subject, isolated_records
from paceline.benchmarks.harness.measure import (
    TORCH_DTYPES,
    Stopwatch,
    resolve_device,
    sample,
    step_peaks,
    storage_bytes,
)
from paceline.core.host import reset_resident_peak, resident_peak_bytes
from paceline.core.ranges import BACKWARD, FORWARD, OPTIMIZER
from paceline.core.specs import precision_preset
from paceline.core.units import Progress
from paceline.devices.hardware import HardwareLocation, describe_hardware, peak_flops
from paceline.devices.named_range import named_range
from paceline.kernels import resolve_implementation
from paceline.models import TransformerLM, next_token_loss
from paceline.records import Record
from paceline.records.schema import CaseValue, Metric, model_case_fields

LEARNING_RATE = 1e-4


class TimedStep:
    """A model, its batch and its optimizer, ready to step."""

    data_seed = 0

    def __init__(self, case: StepCase, device: torch.device) -> None:
        self.device = device
        self.phase = case.phase
        precision = precision_preset(case.precision)
        self._autocast_dtype = TORCH_DTYPES[precision.compute] if precision.autocast else None
        # Seeded, so that two runs of a case compute with the same numbers.
        torch.manual_seed(0)
        with device:
            model = TransformerLM(
                case.shape,
                attention=case.sweep.attention,
                activation_checkpointing=case.sweep.activation_checkpointing,
            )
        if case.sweep.compilation == "blocks":
            model.compile_blocks()
        elif case.sweep.compilation == "whole":
            model.compile()
        self.model = self.wrap(model)
        torch.manual_seed(self.data_seed)
        size = (case.batch.num_sequences, case.batch.context_length + 1)
        tokens = torch.randint(case.shape.vocab_size, size, device=device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.optimizer = self.make_optimizer()
        # float16 has too little range for small gradients: the loss is scaled up.
        self.scaler = torch.amp.GradScaler(device.type, enabled=case.precision == "float16")

    def wrap(self, model: TransformerLM) -> nn.Module:
        """Returns the model to train; a data-parallel strategy wraps it."""
        return model

    def make_optimizer(self) -> Optimizer:
        """Creates the optimizer of the wrapped model."""
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def forward(self) -> Tensor:
        """Returns the loss; gradients are recorded only if a backward pass follows."""
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(named_range(FORWARD))
            contexts.enter_context(torch.set_grad_enabled(self.phase != "forward"))
            # As in the trainer, the loss is outside: autocast's copies of weights end before it.
            with self._autocast():
                logits = self.model(self.inputs)
            return next_token_loss(logits, self.targets)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self._autocast_dtype)

    def backward(self, loss: Tensor) -> None:
        """Accumulates gradients."""
        with named_range(BACKWARD):
            torch.autograd.backward(self.scaler.scale(loss))

    def optimizer_step(self) -> None:
        """Updates the parameters and drops the gradients."""
        with named_range(OPTIMIZER):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> dict[str, float]:
        """Runs one step and returns the seconds of its phases and of the whole."""
        if self.phase == "forward-backward":
            self.optimizer.zero_grad(set_to_none=True)
        watch = Stopwatch(self.device)
        loss = self.forward()
        laps = {"forward_time_s": watch.lap()}
        if self.phase != "forward":
            self.backward(loss)
            laps["backward_time_s"] = watch.lap()
        if self.phase == "train":
            self.optimizer_step()
            laps["optimizer_time_s"] = watch.lap()
        laps["step_time_s"] = sum(laps.values())
        return laps

    def memory(self) -> dict[str, int]:
        """Runs one more step and returns its peaks; call it after at least one step."""
        self.optimizer.zero_grad(set_to_none=True)
        reset_resident_peak()
        resident: dict[str, int] = {}

        def run_and_note(name: str, run: Callable[[], None]) -> None:
            run()
            resident[f"resident_peak_{name}_bytes"] = resident_peak_bytes()

        phases = {"before_optimizer": self.forward_and_backward}
        if self.phase == "train":
            phases["after_optimizer"] = self.optimizer_step
        peaks = step_peaks(
            self.device,
            resident_tensors=self.resident_tensors(),
            phases={name: partial(run_and_note, name, run) for name, run in phases.items()},
        )
        return {f"peak_{name}_bytes": value for name, value in peaks.items()} | resident

    def forward_and_backward(self) -> None:
        """Runs a step without its optimizer."""
        loss = self.forward()
        if self.phase != "forward":
            self.backward(loss)

    def parameters(self) -> list[Tensor]:
        """Returns the model's parameters."""
        return list(self.model.parameters())

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that currently exist."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def optimizer_state(self) -> list[Tensor]:
        """Returns the tensors that the optimizer keeps from step to step."""
        kept = tree_leaves(list(self.optimizer.state.values()))
        return [value for value in kept if isinstance(value, Tensor)]

    def resident_tensors(self) -> list[Tensor]:
        """Returns the tensors that exist before a step and outlive it."""
        return [
            *self.parameters(),
            *self.model.buffers(),
            *self.optimizer_state(),
            self.inputs,
            self.targets,
        ]


def step_records(sweep: StepSweep, on_progress: Progress) -> Iterator[Record]:
    """Measures every case of the sweep."""
    subject = Subject(
        kind="step",
        measure=measure_step,
        case_fields=step_case_fields,
        minimum_bytes=lambda case: minimum_step_bytes(
            case.shape, case.batch, precision_preset(case.precision), case.phase
        ),
    )
    return isolated_records(subject, sweep.cases(), sweep.device, sweep.limits, on_progress)


def measure_step(case: StepCase, on_progress: Progress) -> dict[str, Metric]:
    """Measures one case in this process and returns its metrics."""
    device = resolve_device(case.sweep.device)
    step = TimedStep(case, device)
    made_bytes = storage_bytes([*step.model.parameters(), *step.model.buffers()])
    metrics = {
        "memory_after_init_bytes": Metric(value=made_bytes),
        "resident_peak_after_init_bytes": Metric(value=resident_peak_bytes()),
    }
    samples = sample(
        step.run,
        warmup=case.warmup,
        steps=case.sweep.steps,
        time_limit_s=case.sweep.limits.time_limit_s,
        on_progress=on_progress,
    )
    metrics |= {name: Metric.from_samples(values) for name, values in samples.items()}
    metrics |= _rates(case, describe_hardware(device), metrics["step_time_s"].value)
    metrics |= {name: Metric(value=value) for name, value in step.memory().items()}
    return metrics


def step_case_fields(case: StepCase, location: HardwareLocation) -> dict[str, CaseValue]:
    """Returns the case fields of the record."""
    return {
        **model_case_fields(case.model, case.shape, case.batch),
        "phase": case.phase,
        "precision": case.precision,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "compile": case.sweep.compilation,
        "activation_checkpointing": case.sweep.activation_checkpointing,
        "attention": resolve_implementation(case.sweep.attention, location.device),
        "optimizer": "adamw",
        **location.as_case(),
        "warmup": case.warmup,
        "steps": case.sweep.steps,
    }


def _rates(case: StepCase, location: HardwareLocation, step_time_s: float) -> dict[str, Metric]:
    tokens_per_s = case.batch.tokens_per_pass / step_time_s
    peak = peak_flops(location, precision_preset(case.precision))
    rates = {"tokens_per_s": tokens_per_s}
    suffixes: dict[AttentionConvention, str] = {"full": "", "causal": "_causal"}
    for convention, suffix in suffixes.items():
        flops = flops_per_token(
            case.shape,
            case.batch.context_length,
            convention=convention,
            activation_checkpointing=case.sweep.activation_checkpointing,
        )
        model = flops.forward if case.phase == "forward" else flops.model
        executed = flops.forward if case.phase == "forward" else flops.hardware
        rates[f"model_flops_per_s{suffix}"] = tokens_per_s * model
        if peak is not None:
            rates[f"model_flops_utilization{suffix}"] = tokens_per_s * model / peak
            rates[f"hardware_flops_utilization{suffix}"] = tokens_per_s * executed / peak
    return {name: Metric(value=value) for name, value in rates.items()}
