"""All that a run consists of, saved and restored: weights, optimizers, place in the data, chance.

What is saved knows neither ranks nor strategies: any number and any strategy goes on from it.
"""

import msgspec

from paceline.core.errors import UsageError
from paceline.data.loader.torch_batches import TorchLoader
from paceline.parallel import Session
from paceline.training.build import Trainee
from paceline.training.checkpoint.checkpointer import Checkpointer
from paceline.training.checkpoint.restore import Source, load_newest_valid
from paceline.training.checkpoint.state.random_numbers import (
    capture_random_state,
    restore_random_state,
)
from paceline.training.checkpoint.state.training import load_training_state, training_state
from paceline.training.config import RunConfig


class RunStates:
    """Saves and restores the states of one run; all ranks make one and call it alike.

    Args:
        config: The run.
        session: This rank among the others.
        place: Where its checkpoints are.
    """

    def __init__(self, config: RunConfig, session: Session, place: str) -> None:
        self._config = config
        self._session = session
        self._place = place
        self._checkpointer = Checkpointer(
            place, keep=config.checkpoint.keep_last, asynchronous=config.checkpoint.asynchronous
        )

    def save(self, step: int, trainee: Trainee, loader: TorchLoader) -> None:
        """Saves the state after a step; training may go on at once."""
        self._checkpointer.save(
            step,
            training_state(trainee.model, trainee.optimizers),
            identity={"data": loader.state_dict(), "shape": repr(self._config.model.shape)},
            of_rank={"random": capture_random_state()},
        )

    def restore(self, trainee: Trainee, loader: TorchLoader) -> int:
        """Restores the newest state that is intact; returns its step, 0 if there is none."""
        restored = load_newest_valid(
            self._place, lambda source: self._load(source, trainee), self._checkpointer.group
        )
        if restored is None:
            return 0
        loader.load_state_dict(restored.identity["data"])
        if len(restored.ranks) == self._session.world_size:
            # With another number of ranks there is no state of chance to go on from.
            restore_random_state(restored.ranks[self._session.rank]["random"])
        return restored.step

    def finish(self) -> None:
        """Waits until everything is written."""
        self._checkpointer.wait()
        self._checkpointer.close()

    def _load(self, source: Source, trainee: Trainee) -> None:
        identity = msgspec.json.decode(source.checkpoint.manifest.identity)
        saved, own = identity["shape"], repr(self._config.model.shape)
        if saved != own:
            raise UsageError(
                f"{self._place}: step {source.checkpoint.manifest.step} is of another model: "
                f"{saved}; this run's is {own}. Change out, or the model"
            )
        load_training_state(source, trainee.model, trainee.optimizers)
