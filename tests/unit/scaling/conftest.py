"""The courses' runs, where they are at hand, and a surface whose truth is known."""

import os
import pathlib

import pytest

from paceline.scaling import LossSurface, Sweep, read_sweep


@pytest.fixture(scope="session")
def course_sweep() -> Sweep:
    path = os.environ.get("PACELINE_COURSE_DATA")
    if not path:
        pytest.skip("PACELINE_COURSE_DATA does not name the courses' isoflops_curves.json")
    return read_sweep(pathlib.Path(path))


@pytest.fixture(scope="session")
def surface() -> LossSurface:
    return LossSurface(
        irreducible=1.8,
        parameter_scale=480.0,
        parameter_exponent=0.35,
        token_scale=2000.0,
        token_exponent=0.37,
    )
