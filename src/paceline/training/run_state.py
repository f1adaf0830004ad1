"""All that a run consists of, saved and restored: weights, optimizers, place in the data, chance.

What is saved does not know ranks or strategies: any number of ranks and any strategy goes on from it.
"""

import base64
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from paceline.core.errors import UsageError
from paceline.data.loader.torch_batches import TorchLoader
from paceline.parallel import Session
from paceline.training.build import Trainee
from paceline.training.checkpoint.checkpointer import Checkpointer
from paceline.training.checkpoint.restore import Restored, Source, load_newest_valid
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
            _state_of(trainee),
            identity={"data": loader.state_dict(), "shape": repr(self._config.model.shape)},
            of_rank={"random": _random_state(self._session.device)},
        )

    def restore(self, trainee: Trainee, loader: TorchLoader) -> int:
        """Restores the newest state that is intact; returns its step, 0 if there is none."""
        restored = load_newest_valid(
            self._place, lambda source: _load(source, trainee), self._checkpointer.group
        )
        if restored is None:
            return 0
        self._require_same_model(restored)
        loader.load_state_dict(restored.identity["data"])
        if len(restored.ranks) == self._session.world_size:
            # With another number of ranks there is no state of chance to go on from.
            _set_random_state(restored.ranks[self._session.rank]["random"], self._session.device)
        return restored.step

    def finish(self) -> None:
        """Waits until everything is written."""
        self._checkpointer.wait()
        self._checkpointer.close()

    def _require_same_model(self, restored: Restored) -> None:
        saved, own = restored.identity["shape"], repr(self._config.model.shape)
        if saved != own:
            raise UsageError(
                f"{self._place}: step {restored.step} is of another model: {saved}; this run's is "
                f"{own}. Change out, or the model"
            )


def _state_of(trainee: Trainee) -> dict[str, Any]:
    model, optimizers = get_state_dict(trainee.model, trainee.optimizers)
    return {"model": model, "optimizers": optimizers}


def _load(source: Source, trainee: Trainee) -> None:
    state = _state_of(trainee)
    source.load(state)
    set_state_dict(
        trainee.model,
        trainee.optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
    )


def _random_state(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {
        name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()
    }


def _set_random_state(saved: dict[str, str], device: torch.device) -> None:
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in saved.items()
    }
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
