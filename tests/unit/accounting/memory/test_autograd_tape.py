"""Tests of the autograd tape: saved buffers, in-place accumulation and peaks."""

import pytest

from paceline.accounting.memory.autograd_tape import Buffer, Tape, Value


def _parameter(num_bytes: int) -> Value:
    return Value(Buffer(num_bytes), is_parameter=True)


def test_what_two_operations_keep_counts_once() -> None:
    tape = Tape()
    x = tape.operate([_parameter(3)], 10, gradient_bytes=[3])
    for _ in range(2):
        tape.operate([x], 10, keeps=[x], gradient_bytes=[10])
    assert tape.kept_bytes("activation") == 10
    assert tape.kept_bytes("weight_copy") == 0


def _two_uses(*, gives_views: bool) -> int:
    """Returns the peak when two gradients of ten bytes are added."""
    tape = Tape()
    x = tape.operate([_parameter(0)], 0, gradient_bytes=[0])
    parts = [tape.operate([x], 0, gradient_bytes=[10], gives_views=gives_views) for _ in range(2)]
    total = tape.operate(parts, 0, gradient_bytes=[None, None])
    tape.play_back(total, tape.allocate(0))
    return tape.peak_bytes


def test_a_gradient_is_added_in_place_unless_the_first_is_a_view() -> None:
    assert _two_uses(gives_views=False) == 20
    assert _two_uses(gives_views=True) == 30


def test_gradients_stay_only_where_they_are_kept() -> None:
    peaks = []
    for keeps_gradients in (False, True):
        tape = Tape(keeps_gradients=keeps_gradients)
        x = tape.operate([_parameter(100)], 1, gradient_bytes=[100])
        y = tape.operate([x, _parameter(100)], 1, gradient_bytes=[1, 100])
        tape.drop(x)
        tape.play_back(y, tape.allocate(1))
        peaks.append(tape.peak_bytes)
    # Without kept gradients: the result, its gradient, the gradient of x and one weight gradient.
    # With them: the result, the gradient of x and both weight gradients; the result's is freed.
    assert peaks == [1 + 1 + 1 + 100, 1 + 1 + 200]


def test_a_message_is_there_from_its_first_gradient_to_its_last() -> None:
    tape = Tape()
    weights = [_parameter(8), _parameter(8)]
    tape.collect(weights, 16, 5, group_bytes=0)
    x = tape.operate([weights[0]], 0, gradient_bytes=[8])
    y = tape.operate([x, weights[1]], 0, gradient_bytes=[0, 8])
    tape.play_back(y, tape.allocate(0))
    assert tape.peak_bytes == 24
    after = tape.peak_bytes
    tape.allocate(after)
    assert tape.peak_bytes == after


@pytest.mark.parametrize(("group_bytes", "waiting_bytes"), [(0, 8), (9, 16), (100, 24)])
def test_gradients_wait_for_others_of_their_bucket(group_bytes: int, waiting_bytes: int) -> None:
    tape = Tape()
    weights = [_parameter(8), _parameter(8), _parameter(8)]
    tape.collect(weights, 0, 0, group_bytes=group_bytes)
    value = tape.operate([weights[0]], 0, gradient_bytes=[8])
    for weight in weights[1:]:
        value = tape.operate([value, weight], 0, gradient_bytes=[0, 8])
    tape.play_back(value, tape.allocate(0))
    assert tape.peak_bytes == waiting_bytes


def test_a_checkpoint_keeps_its_input_and_runs_again() -> None:
    runs = []

    def run(value: Value, again: bool) -> Value:
        runs.append(again)
        middle = tape.operate([value], 50, gradient_bytes=[4], working_bytes=0)
        output = tape.operate([middle], 4, keeps=[middle], gradient_bytes=[50])
        tape.drop(middle)
        return output

    tape = Tape()
    x = tape.operate([_parameter(0)], 4, gradient_bytes=[0])
    y = tape.checkpoint(run, x, state_bytes=7)
    assert tape.kept_bytes("activation") == 4
    tape.drop(x)
    tape.play_back(y, tape.allocate(4))
    assert runs == [False, True]
    # Input, state, result, its gradient, and the recomputed middle with its gradient.
    assert tape.peak_bytes == 4 + 7 + 4 + 4 + 50 + 50
