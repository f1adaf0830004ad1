"""A model compiled as a whole completes all gradients at once; compiled blocks do not."""

import warnings

import pytest
import torch

from paceline.core import ModelShape
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import BucketedDataParallel, OverlapWarning, run_ranks

pytestmark = pytest.mark.host("compilers need kernels")

SHAPE = ModelShape(vocab_size=128, d_model=192, d_ff=512, num_layers=3, num_heads=3)
COMPILER_S = 240.0
"""The first compilation takes 20 s on an idle core, and several times as long on a busy one."""


def _warnings(rank: int, _world_size: int, compilation: str) -> list[str]:
    torch.manual_seed(0)
    model = TransformerLM(SHAPE)
    if compilation == "blocks":
        model.compile_blocks()
    elif compilation == "whole":
        model.compile()
    container = BucketedDataParallel(model, 0.25)
    torch.manual_seed(rank)
    tokens = torch.randint(SHAPE.vocab_size, (4, 129))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            next_token_loss(container(tokens[:, :-1]), tokens[:, 1:]).backward()
            container.zero_grad()
    return [str(item.message) for item in caught if issubclass(item.category, OverlapWarning)]


@pytest.mark.slow
def test_a_whole_compiled_model_is_warned_of_once_with_the_remedy() -> None:
    for found in run_ranks(_warnings, 2, "whole", timeout_s=COMPILER_S):
        assert len(found) == 1
        assert "Compile each block instead" in found[0]


@pytest.mark.slow
def test_blocks_and_eager_models_are_not_warned_of() -> None:
    for compilation in ("blocks", "none"):
        assert run_ranks(_warnings, 2, compilation, timeout_s=COMPILER_S) == [[], []]
