"""What pools of the tests ask of programs: where tensors are made, and that there is no race."""

from collections.abc import Iterator

import pytest
import torch

from paceline.core.specs import ModelShape
from paceline.models import TransformerLM
from paceline.parallel import RankError
from tests.distributed.device_pool import DevicePool

SHAPE = ModelShape(vocab_size=8, d_model=8, d_ff=8, num_layers=1, num_heads=1)


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    with DevicePool(1, timeout_s=60) as pool:
        yield pool


def _make(_rank: int, _world_size: int) -> tuple[dict[str, str], torch.Tensor, torch.Tensor]:
    numbers = {"generator": torch.Generator().manual_seed(3)}
    drawn = torch.randn(4, requires_grad=True, **numbers)
    host = torch.ones(1, device="cpu")
    made = {
        "a tensor": torch.ones(1),
        "a module of torch": torch.nn.Linear(2, 2).weight,
        "drawn": drawn,
        "named": host,
        "kept": torch.as_tensor(host),
        "a model of the package": next(TransformerLM(SHAPE).parameters()),
    }
    assert drawn.is_leaf
    return {name: str(tensor.device) for name, tensor in made.items()}, drawn.detach(), host


def test_tensors_of_tests_are_made_on_the_device_and_those_of_the_package_are_not(
    pool: DevicePool,
) -> None:
    ((devices, drawn, host),) = pool.run(_make)
    assert devices == {
        **dict.fromkeys(("a tensor", "a module of torch", "drawn"), "emulated:0"),
        **dict.fromkeys(("named", "kept", "a model of the package"), "cpu"),
    }
    # Results are the host's, and a generator's numbers are the same on every device.
    assert torch.equal(drawn, torch.randn(4, generator=torch.Generator().manual_seed(3)))
    assert host.device.type == "cpu"


def _race(_rank: int, _world_size: int) -> None:
    device = torch.device("emulated", 0)
    numbers = torch.zeros(1000)
    with torch.Stream(device):
        numbers.sum()


def test_a_program_with_a_race_fails(pool: DevicePool) -> None:
    with pytest.raises(RankError, match="race: read by aten::sum"):
        pool.run(_race)
