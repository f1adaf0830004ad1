"""Fixtures of the tests of ZeRO."""

import pytest
from torch.optim import SGD, AdamW

from paceline.parallel.zero import flat_parameters
from tests.unit.parallel.zero.optimizers import (
    Counting,
    Estimating,
    Interrupted,
    Mixed,
    Noting,
    TakesMore,
)


@pytest.fixture
def elementwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own optimizers are known to be elementwise."""
    known = frozenset({AdamW, SGD, Counting, Estimating, Interrupted, Mixed, Noting, TakesMore})
    monkeypatch.setattr(flat_parameters, "_ELEMENTWISE", known)
