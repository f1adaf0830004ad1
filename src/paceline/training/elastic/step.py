"""One step of a replica: its part of the batch, sums over replicas, one decision, one update."""

import dataclasses
import math

import torch

from paceline.data.audit import join_digest, split_digest
from paceline.data.loader.torch_batches import TorchBatch
from paceline.parallel.elastic import Members, ReplicaGradients
from paceline.parallel.replica_group import ReplicaGroup
from paceline.parallel.strategies import clip_grad_norm
from paceline.training.config import StepConfig
from paceline.training.parallelize import Trainee
from paceline.training.step import StepResult, TrainingStep


class ReplicaStep:
    """Runs steps of one replica.

    Args:
        config: Micro-batch size, precision and clipping.
        trainee: The model and its optimizers.
        group: The group of replicas.
        gradients: Gradients of the model, which the group sums.
        device: Device to compute on.
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
        """Trains on this replica's sequences of a batch; returns None if the step does not commit.

        Args:
            batch: This replica's sequences.
            batch_size: Number of sequences over all replicas.
            members: Members of the step.
            stop: Whether this replica was asked to stop; the result tells all replicas.
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
        # Non-finite sums either do not commit, or are the same on all replicas.
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
