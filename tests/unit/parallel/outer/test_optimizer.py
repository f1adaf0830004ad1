"""Tests that the outer optimizer is torch's SGD with Nesterov momentum."""

import pytest
import torch
from torch import nn

from paceline.parallel.outer.optimizer import OuterUpdate


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_updates_are_those_of_torch(momentum: float) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(50))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    update = OuterUpdate(learning_rate=0.7, momentum=momentum)
    values = parameter.detach().clone()
    velocity = torch.zeros(50) if momentum else None
    for _ in range(5):
        gradient = torch.randn(50)
        parameter.grad = gradient.clone()
        optimizer.step()
        values, velocity = update(values, velocity, gradient)
        torch.testing.assert_close(values, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_an_update_leaves_what_it_is_given() -> None:
    values, velocity, gradient = (torch.full((3,), number) for number in (1.0, 2.0, 4.0))
    new, faster = OuterUpdate(learning_rate=0.5, momentum=0.5)(values, velocity, gradient)
    assert faster is not None
    assert faster.tolist() == [5.0] * 3
    assert new.tolist() == [1 - 0.5 * (4 + 0.5 * 5)] * 3
    assert (values[0], velocity[0], gradient[0]) == (1, 2, 4)


def test_values_in_float64_stay_so() -> None:
    update = OuterUpdate(learning_rate=1.0, momentum=0.0)
    values, _ = update(torch.full((1,), 1 + 2**-40, dtype=torch.float64), None, torch.ones(1))
    assert values.item() == 2**-40
