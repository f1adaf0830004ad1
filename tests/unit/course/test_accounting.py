"""The right answers to the courses' questions, to the digits that are known."""

import pytest

from paceline.core import model_preset
from paceline.core.errors import ShapeError
from paceline.course.accounting import account

ANSWERS = [explanation.values for explanation in account(model_preset("xxl"))]


def test_states_and_what_is_saved() -> None:
    memory = ANSWERS[0]
    assert memory["num_parameters"] == 219_848_638_464
    assert memory["state_bytes"] / 1e9 == pytest.approx(3517.6, abs=0.05)
    assert memory["state_bytes"] / 2**30 == pytest.approx(3276, abs=0.5)
    assert memory["saved_bytes_per_token"] == 17_547_264
    assert memory["devices_of_80_gib"] == 41
    assert memory["devices_of_80_gb"] == 44


def test_devices_that_share_the_states() -> None:
    sharded = ANSWERS[1]
    assert sharded["devices_of_95_gib"] == 35
    assert sharded["devices_of_95_gb"] == 38
    assert sharded["devices_with_4096_tokens"] == 54
    assert sharded["most_tokens_per_device"] == pytest.approx(11_600, rel=0.01)


def test_batches_that_are_compute_bound() -> None:
    fixed, chosen = ANSWERS[2:]
    assert fixed["gamma"] == pytest.approx(2555.6, abs=0.05)
    assert fixed["batch_tokens_add"] == pytest.approx(25_302, abs=0.5)
    assert fixed["batch_tokens_overlap"] == pytest.approx(20_444, abs=0.5)
    assert fixed["batch_tokens_add"] / 64 == pytest.approx(395, abs=0.5)
    assert fixed["batch_tokens_overlap"] / 64 == pytest.approx(319, abs=0.5)
    assert chosen["batch_tokens_add"] == pytest.approx(15_700, abs=1)
    assert chosen["batch_tokens_overlap"] == pytest.approx(3_925, abs=0.5)
    assert chosen["tensor_add"] == pytest.approx(10.4, abs=0.05)
    assert chosen["tensor_overlap"] == pytest.approx(20.8, abs=0.05)


def test_every_answer_shows_its_working() -> None:
    for explanation in account(model_preset("xxl")):
        text = explanation.render()
        assert explanation.assumptions
        for step in explanation.steps:
            assert step.formula in text
            assert step.result in text


def test_other_models_are_refused() -> None:
    with pytest.raises(ShapeError, match="such as xxl"):
        account(model_preset("small"))
