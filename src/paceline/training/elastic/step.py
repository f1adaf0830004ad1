"""One step of a replica: its part of the batch, sums over replicas, one decision, one update."""

import dataclasses
import math

import torch

from paceline.data.loader.torch_batches import TorchBatch
from paceline.data.sampling.audit import join_digest, split_digest
from paceline.parallel.elastic.gradients import ReplicaGradients
from paceline.parallel.elastic.members import Members
from paceline.parallel.elastic.replica_group import ReplicaGroup
from paceline.parallel.strategies import clip_grad_norm
from paceline.training.build import Trainee
from paceline.training.config import StepConfig
from paceline.training.steps.step import StepResult, TrainingStep


class ReplicaStep:
    """Runs steps of one replica.

    Args:
        config: Micro-batches, precision, clipping.
        trainee: The model and its optimizers.
        group: The replicas.
        gradients: Of the model, which the group adds up.
        device: Where it computes.
    """

    def __init__(
        self,
        config: StepConfig,
        trainee: Trainee,
        group: ReplicaGroup,
        gradients: ReplicaGradients,
        device: torch.device,
    ) -> None:
        self._config = config
        self._trainee = trainee
        self._group = group
        self._gradients = gradients
        self._device = device
        self.autocast = self._runner(config.batch_size).autocast

    def run(
        self, batch: TorchBatch, batch_size: int, members: Members, *, stop: bool
    ) -> StepResult | None:
        """Trains on this replica's sequences of a batch; None if the step does not count.

        Args:
            batch: Its sequences.
            batch_size: The sequences of all replicas.
            members: Who takes part.
            stop: Whether this replica was asked to stop; all learn of it with the loss.
        """
        config = dataclasses.replace(self._config, batch_size=batch_size)
        passes = config.num_passes(members.live)
        self._gradients.begin(passes)
        loss = self._runner(batch_size).forward_and_backward(batch.tokens, batch.targets, passes)
        self._gradients.finish()
        host = torch.tensor([float(stop), *split_digest(batch.digest or 0)], dtype=torch.float64)
        sums = torch.cat([loss.double().view(1), host.to(loss.device)])
        self._group.add_up(sums).wait()
        norm = clip_grad_norm(self._trainee.model, self._config.clip_norm or math.inf)
        total, num_stops, *parts, gradient_norm = torch.cat([sums, norm.to(sums).view(1)]).tolist()
        optimizers = self._trainee.optimizers.values()
        result = None
        # Numbers that are not finite are those of a sum that went wrong, or of all replicas.
        if self._group.commit():
            result = StepResult(
                loss=total,
                gradient_norm=gradient_norm,
                stop=num_stops > 0,
                digest=join_digest(parts),
            )
            if result.is_finite:
                for optimizer in optimizers:
                    optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return result

    def _runner(self, batch_size: int) -> TrainingStep:
        return TrainingStep(
            dataclasses.replace(self._config, batch_size=batch_size),
            self._trainee.model,
            list(self._trainee.optimizers.values()),
            self._device,
        )
