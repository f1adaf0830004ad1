"""Memory of a data-parallel training step of any model, also of those that cannot be built here.

`paceline.accounting.memory.step` counts every tensor of `TransformerLM`. Models with experts,
latent attention, biases or layer norms have the formulas of `paceline.predict.cost.memory`, which
are exact for model states and approximate for activations. A strategy is the layout with only
data-parallel ranks that shards the same states.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from paceline.accounting.memory.activations import SavedForBackward
from paceline.accounting.memory.step import MemoryParts, StepPlan
from paceline.accounting.model_config import NamedModel
from paceline.core.errors import ShapeError
from paceline.core.plan import ParallelLayout
from paceline.core.specs import Experts, ModelShape, require_buildable
from paceline.core.strategies import sharding_of
from paceline.predict.cost.layouts import Layouts, Workload
from paceline.predict.cost.memory import LayoutMemory, layout_memory


def step_plan(model: NamedModel, **settings: Any) -> StepPlan:
    """Returns the plan of a step of a model; `settings` are the other fields of `StepPlan`."""
    if model.experts is None and _is_buildable(model.shape):
        return StepPlan(shape=model.shape, **settings)
    return AnyModelStepPlan(shape=model.shape, experts=model.experts, **settings)


def _is_buildable(shape: ModelShape) -> bool:
    try:
        require_buildable(shape)
    except ShapeError:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyModelStepPlan(StepPlan):
    """A training step of a model that `TransformerLM` does not build."""

    experts: Experts | None = None
    """Experts of a mixture; the shape's `d_ff` is then the active width."""

    def instants(self, world_size: int) -> dict[str, MemoryParts]:
        """Returns the memory of a rank at each instant of the step."""
        held = self._memory(world_size)
        states = held.states
        beside = states.weight_copies + states.gathered + held.activations + held.working
        before = MemoryParts(
            parameters=_bytes(states.parameters),
            gradients=_bytes(states.gradients),
            optimizer_state=_bytes(states.optimizer_state),
            buffers=_bytes(states.buckets),
            activations=_bytes(beside),
        )
        return {
            "after_init": dataclasses.replace(
                before, gradients=0, optimizer_state=0, buffers=0, activations=0
            ),
            "before_step": before,
            "after_step": dataclasses.replace(before, buffers=0, activations=0),
        }

    @property
    def kept_for_backward(self) -> SavedForBackward:
        """Returns what one rank has saved after forward."""
        held = self._memory(2)  # With a single rank, nothing would be sharded.
        return SavedForBackward(
            activations=_bytes(held.activations), weight_copies=_bytes(held.states.weight_copies)
        )

    @property
    def method(self) -> str:
        """How the memory is found, as an assumption of the explanation."""
        return "model states exactly, activations by formula: this model cannot be built here"

    def _memory(self, world_size: int) -> LayoutMemory:
        sharding = sharding_of(self.strategy)
        layout = ParallelLayout(
            replicate=world_size if sharding == "none" else 1,
            shard=1 if sharding == "none" else world_size,
            sharding=sharding,
            activation_checkpointing=self.checkpointing,
        )
        workload = Workload(
            shape=self.shape,
            experts=self.experts,
            precision=self.precision,
            context_length=self.batch.context_length,
            micro_batch=self.batch.num_sequences,
            num_micro_batches=1,
            attention="naive" if self.attention == "naive" else "flash",
        )
        return layout_memory(Layouts.of([layout]), workload)


def _bytes(size: Any) -> int:
    """Returns a whole number of bytes, from a number or the array of one layout."""
    return math.ceil(float(np.max(size)))
