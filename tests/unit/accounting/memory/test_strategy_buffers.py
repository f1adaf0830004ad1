"""Tests of what strategies hold beside autograd, on chains of operations without activations."""

from collections.abc import Callable

import pytest

from paceline.accounting.memory import strategy_buffers
from paceline.accounting.memory.autograd_tape import Buffer, Tape, Value
from paceline.accounting.memory.strategy_buffers import (
    Buckets,
    LayerPlan,
    LocalGradients,
    MessagePlan,
    ShardedLayers,
    TorchBuckets,
    TorchLayers,
)

_GRADIENT = 8
_LAYER = LayerPlan(full=100, message=20, shard=10)


def _peaks(make: Callable[[Tape], LocalGradients], *, num_units: int, passes: int = 1) -> list[int]:
    """Returns the peak after each pass; each unit has one parameter of eight bytes."""
    tape = Tape()
    holder = tape.holder = make(tape)
    peaks = []
    for number in range(1, passes + 1):
        weights = [Value(Buffer(_GRADIENT), is_parameter=True) for _ in range(num_units)]
        holder.begin_pass(weights, averages=number == passes)
        values: list[Value] = []
        for unit, weight in enumerate(weights):
            tape.begin_unit(unit)
            gradients = [0] * len(values[-1:]) + [_GRADIENT]
            values.append(tape.operate([*values[-1:], weight], 0, gradient_bytes=gradients))
            tape.end_unit(unit)
        tape.play_back(values[-1], tape.allocate(0))
        holder.end_pass()
        peaks.append(tape.peak_bytes)
    return peaks


def test_gradients_of_a_second_pass_are_added_in_place() -> None:
    # Three gradients stay; in the second pass, one more exists at a time.
    assert _peaks(LocalGradients, num_units=3, passes=2) == [24, 32]


@pytest.mark.parametrize(("group_bytes", "waiting_bytes"), [(0, 8), (9, 16), (100, 24)])
def test_gradients_wait_for_others_of_their_bucket(
    monkeypatch: pytest.MonkeyPatch, group_bytes: int, waiting_bytes: int
) -> None:
    monkeypatch.setattr(strategy_buffers, "GROUP_BYTES", group_bytes)

    def buckets(tape: Tape) -> Buckets:
        return Buckets(tape, [MessagePlan(3)], 3)

    assert _peaks(buckets, num_units=3) == [waiting_bytes]
    # A pass that is not averaged moves each gradient at once, and later ones are added there.
    assert _peaks(buckets, num_units=3, passes=2) == [8, 8]


def test_torch_moves_no_gradient_in_a_pass_that_is_not_averaged() -> None:
    assert _peaks(TorchBuckets, num_units=3) == [8]
    assert _peaks(TorchBuckets, num_units=3, passes=2) == [24, 32]


def test_a_message_is_there_until_the_next_one_has_been_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategy_buffers, "GROUP_BYTES", 0)

    def messages(arriving: int) -> Callable[[Tape], Buckets]:
        return lambda tape: Buckets(tape, [MessagePlan(1, 20, arriving)] * 3, 3)

    # Two messages, and the gradient that is moved into the second.
    assert _peaks(messages(0), num_units=3) == [2 * 20 + 8]
    # Two messages, and what arrives for both.
    assert _peaks(messages(10), num_units=3) == [2 * (20 + 10)]
    # Whole gradients stay. When the first is moved into its message, all of them exist still.
    assert _peaks(messages(0), num_units=3, passes=2) == [24, 2 * 20 + 2 * 8]


def _sharded(tape: Tape, *, receives: bool = False) -> ShardedLayers:
    return ShardedLayers(
        tape, [_LAYER] * 6, layer_of=range(6), layer_of_unit=range(6), receives=receives
    )


def test_two_layers_are_gathered_ahead_and_two_messages_exist() -> None:
    # At layer 2: three layers, the message of layer 3, layer 2's own with its gradient, and what
    # the messages of layers 5 and 4 have left.
    # At layer 1: two layers only, and the shard of layer 3 as well.
    assert _peaks(_sharded, num_units=6) == [3 * 100 + 20 + 20 + 8 + 2 * 10]
    # Of layer 3's message, the other rank's part has arrived.
    received = _peaks(lambda tape: _sharded(tape, receives=True), num_units=6)
    assert received == [3 * 100 + (20 + 10) + 20 + 8 + 2 * 10]


def test_a_pass_that_is_not_averaged_keeps_messages() -> None:
    first, second = _peaks(_sharded, num_units=6, passes=2)
    # At layer 2: the messages of layers 5 to 2; at the end all six, but fewer layers.
    assert first == 3 * 100 + 4 * 20 + 8
    # In the last pass at layer 5: three layers, all six, its new message and its gradient.
    assert second == 3 * 100 + 6 * 20 + 20 + 8


def test_a_shared_layer_stays_until_its_first_use_has_run_backward() -> None:
    def tied(tape: Tape) -> ShardedLayers:
        return ShardedLayers(
            tape,
            [_LAYER] * 5,
            layer_of=[0, 1, 2, 3, 4, 0],
            layer_of_unit=[0, 1, 2, 3, 4, 0],
            receives=False,
        )

    # At layer 3: the shared layer beside three others; its message, opened first and sent last,
    # that of layer 4, and layer 3's own with its gradient.
    assert _peaks(tied, num_units=6) == [4 * 100 + 20 + 20 + 20 + 8]


def _torch_peak(layer: LayerPlan) -> int:
    # Units: embedding, three blocks, norm, head; all but blocks are one layer.
    (peak,) = _peaks(
        lambda tape: TorchLayers(tape, [layer] * 4, [0, 1, 2, 3, 0, 0], 3), num_units=6
    )
    return peak


def test_of_torch_three_buffers_of_blocks_exist_when_a_second_block_is_gathered() -> None:
    # In forward at block 2: the root, what blocks 1 and 2 have received, and block 2's copy.
    assert _torch_peak(_LAYER) == 4 * 100


def test_of_torch_a_block_is_gathered_and_another_averaged_in_backward() -> None:
    # Before block 1: the root, what block 1 has received and its copy, the input of block 2's
    # reduction, two shards, and the gradients of head and norm.
    layer = LayerPlan(full=100, message=100, shard=50)
    assert _torch_peak(layer) == 3 * 100 + 100 + 2 * 50 + 2 * 8
