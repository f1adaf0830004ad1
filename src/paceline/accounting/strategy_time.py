"""How long a data-parallel step takes on a calibrated machine, by what its time goes to.

Computing is `paceline.accounting.compute_time`'s. What a strategy adds, with P parameters on n
ranks:

    optimizer     P, or P/n where its state is divided, times what a parameter's update takes
    handling      passes over the gradients, into buckets and out of them
    exposed       what is waited for: every message of naive and flat; of the others what is left
                  when backward is over (`paceline.accounting.overlap`, message by message). With a
                  sharded optimizer all parameters come back after its step; sharded containers
                  send them bucket by bucket, and the next forward waits only where it must
    contention    what computing loses to messages that go beside it, by the byte, and no more than
                  it would lose by waiting for them; meanwhile they take longer, too

How many messages go beside backward depends on how long it takes, which depends on them: the
two are found by going round a few times.
"""

import dataclasses
from collections.abc import Sequence

from paceline.accounting.calibration import Calibration, Contention
from paceline.accounting.compute_time import ComputeTime, compute_time
from paceline.accounting.gradient_messages import Message, gradient_messages
from paceline.core.errors import UsageError
from paceline.core.operations import Operation
from paceline.core.specs import BatchShape, ModelShape
from paceline.core.strategies import SHARDED_STATE, StrategyName

PREDICTED: tuple[StrategyName, ...] = (
    *("none", "naive", "flat", "overlapped", "bucketed", "torch_ddp"),
    *("sharded_optimizer", "sharded"),
)
"""The strategies whose step can be predicted."""

# Numbers read and written per gradient: into the bucket, and its average out of it. torch averages
# on the way in; an owner adds up what it gets.
_PASSES: dict[StrategyName, float] = {
    "naive": 4,
    "flat": 4,
    "overlapped": 4,
    "bucketed": 4,
    "torch_ddp": 2,
    "sharded_optimizer": 4,
    "sharded": 4,
}
_AFTER_BACKWARD: tuple[StrategyName, ...] = ("naive", "flat")
_GATHER: Operation = "gather_from_owners"
_ROUNDS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTerms:
    """Seconds of a step by what they go to."""

    products_s: float
    attention_s: float
    stream_s: float
    calls_s: float
    handling_s: float
    optimizer_s: float
    contention_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return float(sum(dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class _Beside:
    """Communication beside computing."""

    lost_s: float
    """What computing loses."""
    exposed_s: float
    """What is waited for."""


def strategy_step_terms(
    shape: ModelShape,
    batch: BatchShape,
    strategy: StrategyName,
    calibration: Calibration,
    bucket_size_mb: float | None = None,
) -> StepTerms:
    """Predicts a step in float32 on the ranks of the calibration."""
    if strategy not in PREDICTED:
        raise UsageError(
            f"the time of {strategy!r} is not predicted yet; predicted: {', '.join(PREDICTED)}"
        )
    computing = compute_time(shape, batch, calibration)
    sizes = [size for piece in computing.pieces for size in piece.parameter_sizes]
    world_size = calibration.world_size
    divides = strategy in SHARDED_STATE and world_size > 1
    handling_s = lost_s = exposed_s = 0.0
    optimizer_s = sum(sizes) * calibration.optimizer_element_s / (world_size if divides else 1)
    if strategy != "none" and world_size > 1:
        handling_s = _PASSES[strategy] * sum(sizes) * calibration.copy_element_s
        messages = gradient_messages(strategy, sizes, bucket_size_mb)
        gradients = _gradients(strategy, messages, computing, handling_s, calibration)
        parameters = _parameters(strategy, messages, computing, optimizer_s, calibration)
        lost_s = gradients.lost_s + parameters.lost_s
        exposed_s = gradients.exposed_s + parameters.exposed_s
    return StepTerms(
        products_s=computing.total("products_s"),
        attention_s=computing.total("attention_s"),
        stream_s=computing.total("stream_s"),
        calls_s=computing.total("calls_s"),
        handling_s=handling_s,
        optimizer_s=optimizer_s,
        contention_s=lost_s,
        exposed_s=exposed_s,
    )


def _gradients(
    strategy: StrategyName,
    messages: Sequence[Message],
    computing: ComputeTime,
    handling_s: float,
    calibration: Calibration,
) -> _Beside:
    operation: Operation = "reduce_to_owners" if strategy == "sharded" else "all_reduce"
    alone_s = [calibration.collective(operation).time_s(message.num_bytes) for message in messages]
    if strategy in _AFTER_BACKWARD:
        return _Beside(0.0, sum(alone_s))
    arrivals = computing.arrivals_s()
    ready = [max(arrivals[place] for place in message.parameters) for message in messages]
    return _beside(
        ready,
        alone_s,
        [message.num_bytes for message in messages],
        calibration.contention(operation),
        work_s=computing.backward_s,
        further_s=handling_s,
    )


def _parameters(
    strategy: StrategyName,
    messages: Sequence[Message],
    computing: ComputeTime,
    optimizer_s: float,
    calibration: Calibration,
) -> _Beside:
    """Returns what sending updated parameters adds."""
    if strategy not in SHARDED_STATE:
        return _Beside(0.0, 0.0)
    if strategy == "sharded_optimizer":
        num_bytes = sum(message.num_bytes for message in messages)
        return _Beside(0.0, calibration.collective(_GATHER).time_s(num_bytes))
    return _beside_forward(messages[::-1], computing, optimizer_s, calibration)


def _beside(
    ready_s: Sequence[float],
    alone_s: Sequence[float],
    num_bytes: Sequence[int],
    cost: Contention,
    *,
    work_s: float,
    further_s: float,
) -> _Beside:
    """Plays messages beside work that becomes longer by what it loses to them."""
    lost_s = exposed_s = 0.0
    for _ in range(_ROUNDS):
        end_s = work_s + further_s + lost_s
        finish_s = owed_s = 0.0
        for ready, alone, size in zip(ready_s, alone_s, num_bytes, strict=True):
            start_s = max(ready * end_s / work_s, finish_s)
            beside_s = min(max(0.0, end_s - start_s), alone * cost.slowdown)
            share = beside_s / (alone * cost.slowdown)
            finish_s = start_s + beside_s + (1 - share) * alone
            owed_s += share * min(cost.lost_s_per_byte * size, alone)
        # Half of the way, so that it does not swing.
        lost_s = (lost_s + owed_s) / 2
        exposed_s = max(0.0, finish_s - end_s)
    return _Beside(lost_s, exposed_s)


def _beside_forward(
    messages: Sequence[Message],
    computing: ComputeTime,
    optimizer_s: float,
    calibration: Calibration,
) -> _Beside:
    """Plays parameters that are updated and sent bucket by bucket, while forward follows them."""
    gather = calibration.collective(_GATHER)
    cost = calibration.contention(_GATHER)
    num_bytes = sum(message.num_bytes for message in messages)
    lost_s = 0.0
    arrivals: dict[int, float] = {}
    updated_s = finish_s = 0.0
    for message in messages:
        updated_s += optimizer_s * message.num_bytes / num_bytes
        alone_s = gather.time_s(message.num_bytes)
        lost_s += min(cost.lost_s_per_byte * message.num_bytes, alone_s)
        finish_s = max(finish_s, updated_s) + alone_s * cost.slowdown
        arrivals |= dict.fromkeys(message.parameters, finish_s)
    stretch = 1 + lost_s / computing.forward_s
    end_s = optimizer_s
    place = 0
    for piece, time in zip(computing.pieces, computing.forward, strict=True):
        needed = range(place, place + len(piece.parameter_sizes))
        place = needed.stop
        end_s = max(end_s, *(arrivals[index] for index in needed), 0.0) + time.total_s * stretch
    return _Beside(lost_s, end_s - optimizer_s - computing.forward_s - lost_s)
