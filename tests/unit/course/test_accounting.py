"""Tests the answers to the courses' accounting questions against known values."""

import pytest

from paceline.core import model_preset
from paceline.core.errors import ShapeError
from paceline.course.accounting import account

STATES = {"num_parameters": 219_848_638_464, "state_bytes": 3_517_578_215_424}
STATES |= {"saved_bytes_per_token": 17_547_264, "devices_of_80_gib": 41, "devices_of_80_gb": 44}
SHARDED = {"devices_of_95_gib": 35, "devices_of_95_gb": 38}
SHARDED |= {"devices_with_4096_tokens": 54, "most_tokens_per_device": 11_626.37}
FIXED = {"gamma": 2555.556, "batch_tokens_add": 25_301.7, "batch_tokens_overlap": 20_444.4}
FREE = {"batch_tokens_add": 15_699.2, "batch_tokens_overlap": 3_924.8}
FREE |= {"tensor_add": 10.4181, "tensor_overlap": 20.8362}
RIGHT = (STATES, SHARDED, FIXED, FREE)


def test_every_answer_is_right_and_shows_its_working_and_other_models_are_refused() -> None:
    for explanation, right in zip(account(model_preset("xxl")), RIGHT, strict=True):
        assert explanation.values == pytest.approx(right, rel=1e-5)
        text = explanation.render()
        assert explanation.assumptions
        for step in explanation.steps:
            assert step.formula in text
            assert step.result in text
    with pytest.raises(ShapeError, match="such as xxl"):
        account(model_preset("small"))
