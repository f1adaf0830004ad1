"""On the emulated device, commands and their ranks must run without a race."""

import os
import pathlib
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="package", autouse=True)
def hazards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Yields the file to which the emulated device of every command writes hazards."""
    file = tmp_path_factory.mktemp("hazards") / "found.txt"
    with mock.patch.dict(os.environ, {"EMULATED_HAZARDS_FILE": str(file)}):
        yield file


@pytest.fixture(autouse=True)
def _no_hazards(hazards: pathlib.Path) -> Iterator[None]:
    yield
    assert not hazards.exists(), hazards.read_text()
