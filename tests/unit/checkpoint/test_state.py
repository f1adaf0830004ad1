"""Tests that all optimizer state is restored: any shape, options, several optimizers."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.restore import load_newest_valid
from paceline.checkpoint.state import load_training_state, training_state
from tests.distributed.toys import Shapes, data, loss_of

Optimizers = dict[str, Optimizer]


def _muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return {"muon": Muon(matrices, lr=0.02), "adamw": AdamW(others, lr=0.01)}


CASES: dict[str, Callable[[nn.Module], Optimizers]] = {
    "adamw": lambda model: {"main": AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)},
    "amsgrad": lambda model: {"main": AdamW(model.parameters(), amsgrad=True)},
    "sgd": lambda model: {"main": SGD(model.parameters(), lr=0.1, momentum=0.9)},
    "adagrad": lambda model: {"main": Adagrad(model.parameters())},
    "adafactor": lambda model: {"main": Adafactor(model.parameters())},
    "two": _muon_and_adamw,
}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, _rank: int) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def _step(model: nn.Module, optimizers: Optimizers, number: int) -> None:
    loss_of(model(data(number, 0), 0)).backward()
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_to_the_bit(tmp_path: pathlib.Path, case: str) -> None:
    # Strides, scalars, complex numbers; not for optimizers that treat matrices specially.
    make: Any = Shapes if case in ("adamw", "amsgrad", "sgd") else Plain
    torch.manual_seed(0)
    model = make()
    optimizers = CASES[case](model)
    for number in range(2):
        _step(model, optimizers, number)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, training_state(model, optimizers), None)
    torch.manual_seed(1)
    other = make()
    others = CASES[case](other)
    load_newest_valid(tmp_path, lambda source: load_training_state(source, other, others))
    for name, optimizer in optimizers.items():
        for own, its in zip(
            (p for group in optimizer.param_groups for p in group["params"]),
            (p for group in others[name].param_groups for p in group["params"]),
            strict=True,
        ):
            assert torch.equal(own, its)
            state, its_state = optimizer.state[own], others[name].state[its]
            assert state.keys() == its_state.keys()
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(its_state[key])), key
    if make is Plain:
        for number in range(2, 4):
            _step(model, optimizers, number)
            _step(other, others, number)
        for own, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(own, its)


def test_an_optimizer_that_was_not_saved_is_named(tmp_path: pathlib.Path) -> None:
    model = Plain()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, training_state(model, {"main": SGD(model.parameters())}), None)
    with pytest.raises(CheckpointError, match=r"step-00000001: .* under 'optimizer\.other'"):
        load_newest_valid(
            tmp_path,
            lambda source: load_training_state(source, model, {"other": SGD(model.parameters())}),
        )
