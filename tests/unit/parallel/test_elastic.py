"""Tests of summing replicas' gradients, with a fake group that doubles them."""

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.elastic import ReplicaGradients


class _Work:
    def wait(self) -> bool:
        return True


class _Twice:
    """A fake group of two replicas with identical gradients."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def add_up(self, tensor: Tensor) -> _Work:
        self.sent.append(tensor.numel())
        tensor *= 2
        return _Work()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 2))


@pytest.mark.parametrize("cap_bytes", [0, 200, None])
@pytest.mark.parametrize("passes", [1, 3])
def test_all_gradients_are_added_up_after_the_last_pass(
    cap_bytes: float | None, passes: int
) -> None:
    inputs = torch.randn(passes, 5, 4)
    alone, model, group = _model(), _model(), _Twice()
    alone(inputs.flatten(0, 1)).sum().backward()
    gradients = ReplicaGradients(model.named_parameters(), group.add_up, cap_bytes)  # type: ignore[arg-type]
    for _ in range(2):
        model.zero_grad()
        gradients.begin(passes)
        for part in inputs:
            model(part).sum().backward()
        gradients.finish()
        for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, 2 * expected.grad)
    num_buckets = {0: 6, None: 1}.get(cap_bytes, len(group.sent) // 2)
    assert len(group.sent) == 2 * num_buckets


def test_parameters_that_no_pass_reaches_send_zeros() -> None:
    model, group = _model(), _Twice()
    gradients = ReplicaGradients(model.named_parameters(), group.add_up, 0)  # type: ignore[arg-type]
    gradients.begin(1)
    model[0](torch.randn(5, 4)).sum().backward()
    gradients.finish()
    assert len(group.sent) == 6
    assert not model[3].weight.grad.any()
    assert model[0].weight.grad.any()
