"""Tests of the places of parameters in a fragment's vector."""

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.parallel.compression.codec import BLOCK
from paceline.parallel.outer.fragments import Fragment, trained_parameters

CPU = torch.device("cpu")


class _Parameters(nn.Module):
    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)

    def named(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def _fragments(model: nn.Module, num_replicas: int) -> list[Fragment]:
    trained = trained_parameters(model)
    return [
        Fragment(trained, num_replicas=num_replicas, replica=replica, device=CPU)
        for replica in range(num_replicas)
    ]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_pieces_of_replicated_parameters_are_whole_blocks(num_replicas: int) -> None:
    model = _Parameters(torch.arange(300.0), torch.arange(300.0, 700.0).view(20, 20).t())
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    vectors = [fragment.read(model.named()) for fragment in _fragments(model, num_replicas)]
    assert torch.equal(torch.cat(vectors)[: len(whole)], whole)
    assert not torch.cat(vectors)[len(whole) :].any()
    if num_replicas > 1:
        assert all(len(vector) % BLOCK == 0 for vector in vectors)
        assert len({len(vector) for vector in vectors}) == 1


def test_a_vector_is_written_where_it_was_read() -> None:
    model = _Parameters(torch.arange(6.0).view(2, 3).t(), torch.ones(()), torch.ones(0))
    (fragment,) = _fragments(model, 1)
    with torch.no_grad():
        fragment.write(fragment.read(model.named()) * 2, model.named(), None, adds=False)
        assert torch.equal(model.all[0], 2 * torch.arange(6.0).view(2, 3).t())
        fragment.write(torch.ones(7), model.named(), None, adds=True)
    assert torch.equal(model.all[0], 1 + 2 * torch.arange(6.0).view(2, 3).t())
    assert model.all[1] == 3


def test_narrow_parameters_are_rounded_once() -> None:
    model = _Parameters(torch.ones(2, dtype=torch.bfloat16))
    (fragment,) = _fragments(model, 1)
    assert fragment.dtype == torch.float32
    with torch.no_grad():
        fragment.write(torch.tensor([2**-8 + 2**-20, 2**-9]), model.named(), None, adds=True)
    assert model.all[0].tolist() == [1 + 2**-7, 1]


def test_wide_parameters_stay_wide() -> None:
    model = _Parameters(torch.ones(2), torch.full((1,), 1 + 2**-40, dtype=torch.float64))
    (fragment,) = _fragments(model, 1)
    assert fragment.read(model.named())[2] == 1 + 2**-40


def test_what_cannot_be_averaged_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"parameter 'all.1' is torch.complex64; only real"):
        trained_parameters(_Parameters(torch.ones(2), torch.ones(2, dtype=torch.complex64)))
    frozen = _Parameters(torch.ones(2)).requires_grad_(False)
    with pytest.raises(UsageError, match="no trained parameters"):
        trained_parameters(frozen)
