"""Tests of the autograd tape: saved buffers, in-place accumulation and peaks."""

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


def test_a_holder_sees_units_and_gradients_in_the_order_of_the_pass() -> None:
    seen: list[object] = []

    class Holder:
        def take(self, parameter: Value, gradient: Buffer) -> None:
            seen.append(("gradient", gradient.num_bytes))
            tape.release(gradient)

        def before_forward(self, unit: int) -> None:
            seen.append(("forward", unit))

        def after_forward(self, unit: int) -> None:
            seen.append(("done", unit))

        def before_backward(self, unit: int) -> None:
            seen.append(("backward", unit))

    tape = Tape()
    tape.holder = Holder()
    tape.begin_unit(0)
    x = tape.operate([_parameter(8)], 0, gradient_bytes=[8])
    tape.end_unit(0)
    tape.begin_unit(1)
    y = tape.operate([x, _parameter(9)], 0, gradient_bytes=[0, 9])
    tape.end_unit(1)
    tape.play_back(y, tape.allocate(0))
    forward = [("forward", 0), ("done", 0), ("forward", 1), ("done", 1)]
    backward = [("backward", 1), ("gradient", 9), ("backward", 0), ("gradient", 8)]
    assert seen == forward + backward


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
