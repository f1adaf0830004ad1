"""Fixtures: the courses' runs, if available, and a known loss surface."""

import os
import pathlib

import pytest

from paceline.scaling import LossSurface, Sweep, read_sweep
from tests.unit.scaling.surfaces import SURFACE


@pytest.fixture(scope="session")
def course_sweep() -> Sweep:
    path = os.environ.get("PACELINE_COURSE_DATA")
    if not path:
        pytest.skip("PACELINE_COURSE_DATA does not name the courses' isoflops_curves.json")
    return read_sweep(pathlib.Path(path))


@pytest.fixture(scope="session")
def surface() -> LossSurface:
    return SURFACE
