"""A small single-process run, and helpers to save and compare it."""

import pathlib
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.restore import Restored, load_newest_valid
from paceline.checkpoint.state import load_training_state, training_state


class SmallRun:
    """A model and its optimizer; a step changes every number."""

    def __init__(self, seed: int = 0, width: int = 7) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 5)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return training_state(self.model, {"main": self.optimizer})

    def load(self, place: pathlib.Path | str) -> Restored | None:
        return load_newest_valid(
            place, lambda source: load_training_state(source, self.model, {"main": self.optimizer})
        )

    def numbers(self) -> list[torch.Tensor]:
        """Returns copies of all parameters and optimizer states."""
        state = self.optimizer.state
        kept = [
            one.detach() if isinstance(one, torch.Tensor) else one
            for parameter in self.model.parameters()
            for one in (parameter, *(state[parameter][key] for key in sorted(state[parameter])))
        ]
        return [one.clone() for one in kept]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def save_steps(
    place: pathlib.Path | str, steps: list[int], *, width: int = 7, **options: Any
) -> dict[int, Any]:
    """Saves a run at each of the steps, and returns its numbers by step."""
    run = SmallRun(width=width)
    numbers = {}
    with Checkpointer(place, **{"asynchronous": False, **options}) as checkpointer:
        for step in steps:
            run.step()
            numbers[step] = run.numbers()
            checkpointer.save(step, run.state(), {"step": step, "seed": 0}, {"rank": 0})
    return numbers
