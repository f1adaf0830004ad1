"""A tape of the operations of a forward pass, replayed to count the memory of backward.

Autograd works as follows. An operation saves the tensors that its derivative needs. Backward visits
the operations in reverse order, passes each the gradient of its result, receives the gradients of
its inputs, and releases the saved tensors. A second gradient of a tensor is added to the first in
place, unless the first is a view or still in use. The tape does the same with byte counts instead
of tensors, so that the memory in use is known at every instant, and with it the peak.

Every tensor is a `Buffer`, which counts its references: program variables, operations that saved
it, gradients in flight. Parameters, tables and tokens always exist and are not counted. Copies of
parameters in another dtype are counted as a separate kind.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

Kind = Literal["activation", "weight_copy", "unseen"]
"""unseen is memory that is saved, but not as a tensor that autograd's hooks see."""


@dataclasses.dataclass(eq=False)
class Buffer:
    """A block of memory and its reference count."""

    num_bytes: int
    kind: Kind = "activation"
    holders: int = 1
    is_view: bool = False
    """Whether the tensor is a view of another one."""


@dataclasses.dataclass(eq=False)
class Value:
    """A result or parameter that may receive a gradient."""

    buffer: Buffer
    is_parameter: bool = False
    num_uses: int = 0
    """Number of operations on the tape that take it as input."""
    num_arrived: int = 0
    gradient: Buffer | None = None


class GradientHolder(Protocol):
    """What a training step does with memory beside autograd, in the order in which it does it."""

    def take(self, parameter: Value, gradient: Buffer) -> None:
        """Accepts the complete gradient of a parameter, with the tape's reference to it."""

    def before_forward(self, unit: int) -> None:
        """Is called before the operations of a unit of the model."""

    def after_forward(self, unit: int) -> None:
        """Is called after the operations of a unit."""

    def before_backward(self, unit: int) -> None:
        """Is called when the gradient of a unit's result is complete."""


class Operation(NamedTuple):
    """The tensors that one operation saves, and the memory of its derivative."""

    inputs: Sequence[Value]
    output: Value
    kept: Sequence[Buffer]
    gradient_bytes: Sequence[int | None]
    """Bytes of each input's gradient; None if it is the same tensor as the result's gradient."""
    working_bytes: int = 0
    """Bytes that the derivative needs in addition to its results."""
    gives_views: bool = False
    """Whether the gradients are passed on as views."""
    again: "Callable[[Value, bool], Value] | None" = None
    """For a checkpoint: recomputes the result from its single input."""


class Tape:
    """Records operations, replays them backward, and tracks the peak number of bytes.

    With `keeps_gradients`, parameter gradients stay where they were allocated. Otherwise each is
    freed as soon as it is complete, or passed to the `holder`.
    """

    def __init__(self, *, keeps_gradients: bool = False) -> None:
        self.peak_bytes = 0
        self.holder: GradientHolder | None = None
        """What the step does with gradients and parameters; None if it does nothing."""
        self._recording = True
        self._keeps_gradients = keeps_gradients
        self._live_bytes = 0
        self._operations: list[Operation] = []
        self._units: dict[int, int] = {}
        """The unit that each operation ends, by the operation."""

    def allocate(self, num_bytes: int, kind: Kind = "activation") -> Buffer:
        """Allocates a buffer, with one reference held by the caller."""
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return Buffer(num_bytes, kind)

    def hold(self, buffer: Buffer) -> Buffer:
        """Adds a reference."""
        buffer.holders += 1
        return buffer

    def release(self, *buffers: Buffer) -> None:
        """Drops one reference to each buffer; dropping the last one frees the memory."""
        for buffer in buffers:
            buffer.holders -= 1
            if buffer.holders == 0:
                self._live_bytes -= buffer.num_bytes

    def drop(self, *values: Value) -> None:
        """Releases variables of the program."""
        self.release(*(value.buffer for value in values))

    def operate(
        self,
        inputs: Sequence[Value],
        num_bytes: int | None,
        *,
        keeps: Iterable[Value] = (),
        keeps_output: bool = False,
        gradient_bytes: Sequence[int | None],
        working_bytes: int = 0,
        gives_views: bool = False,
        kind: Kind = "activation",
    ) -> Value:
        """Runs an operation and returns its result, to which the caller holds a reference.

        `inputs` are the operands that receive a gradient; others need not be named. The result has
        `num_bytes`; with None it is a view of the first input. The operation saves the operands in
        `keeps` and, with `keeps_output`, the result. For the other arguments, see `Operation`.
        """
        if num_bytes is None:
            output = Value(self.hold(inputs[0].buffer))
        else:
            output = Value(self.allocate(num_bytes, kind))
        kept = [value.buffer for value in keeps] + [output.buffer] * keeps_output
        operation = Operation(inputs, output, kept, gradient_bytes, working_bytes, gives_views)
        if self._recording:
            self._record(operation)
        return output

    def _record(self, operation: Operation) -> None:
        for value in operation.inputs:
            value.num_uses += 1
        for buffer in operation.kept:
            self.hold(buffer)
        self._operations.append(operation)

    def begin_unit(self, unit: int) -> None:
        """Begins a unit of the model, whose parameters a holder may have to gather."""
        if self.holder is not None:
            self.holder.before_forward(unit)

    def end_unit(self, unit: int) -> None:
        """Ends a unit, whose result is that of the last operation."""
        self._units[id(self._operations[-1])] = unit
        if self.holder is not None:
            self.holder.after_forward(unit)

    def kept_bytes(self, kind: Kind) -> int:
        """Returns the bytes that the operations on the tape have saved, each buffer once."""
        kept = {id(buffer): buffer for done in self._operations for buffer in done.kept}
        return sum(buffer.num_bytes for buffer in kept.values() if buffer.kind == kind)

    def checkpoint(
        self, run: Callable[[Value, bool], Value], value: Value, state_bytes: int
    ) -> Value:
        """Runs operations but saves only their input; backward recomputes them.

        The flag of `run` is true during recomputation, which may stop as soon as everything to be
        saved exists. `state_bytes` are saved with the input `value`, invisible to autograd.
        """
        self._recording = False
        output = run(value, False)
        self._recording = True
        state = self.allocate(state_bytes, "unseen")
        self._record(Operation([value], output, [value.buffer, state], [None], again=run))
        self.release(state)
        return output

    def play_back(self, output: Value, gradient: Buffer) -> None:
        """Runs backward from the gradient of the last result, and empties the tape."""
        self._arrive(output, gradient)
        while self._operations:
            operation = self._operations.pop()
            unit = self._units.pop(id(operation), None)
            if unit is not None and self.holder is not None:
                self.holder.before_backward(unit)
            if operation.again is None:
                gradients = self._differentiate(operation)
            else:
                gradients = [self._run_again(operation.again, operation)]
            self.release(*operation.kept)
            for value, of_input in zip(operation.inputs, gradients, strict=True):
                self._arrive(value, of_input)

    def _differentiate(self, operation: Operation) -> list[Buffer]:
        """Returns the gradients of the inputs, and releases that of the result."""
        given = _gradient(operation.output)
        gradients = [
            self.hold(given) if num_bytes is None else self.allocate(num_bytes)
            for num_bytes in operation.gradient_bytes
        ]
        self.release(self.allocate(operation.working_bytes), given)
        for gradient in gradients:
            gradient.is_view = gradient.is_view or operation.gives_views
        return gradients

    def _run_again(self, run: Callable[[Value, bool], Value], operation: Operation) -> Buffer:
        """Records the operations again, replays them backward, and returns the input's gradient."""
        before, self._operations = self._operations, []
        copy = Value(operation.inputs[0].buffer)
        output = run(copy, True)
        self.drop(output)
        self.play_back(output, _gradient(operation.output))
        self._operations = before
        return _gradient(copy)

    def _arrive(self, value: Value, gradient: Buffer) -> None:
        """Accumulates a gradient of a value; a parameter's gradient may then be complete."""
        if value.gradient is None:
            value.gradient = gradient
        elif value.gradient.holders == 1 and not value.gradient.is_view:
            self.release(gradient)
        else:
            # The first gradient may still be in use, so the sum needs new memory.
            total = self.allocate(gradient.num_bytes)
            self.release(value.gradient, gradient)
            value.gradient = total
        value.num_arrived += 1
        if value.is_parameter and value.num_arrived == value.num_uses:
            self._complete(value, value.gradient)

    def _complete(self, parameter: Value, gradient: Buffer) -> None:
        """Passes on, keeps or frees the complete gradient of a parameter."""
        if self.holder is not None:
            self.holder.take(parameter, gradient)
        elif not self._keeps_gradients:
            self.release(gradient)


def _gradient(value: Value) -> Buffer:
    assert value.gradient is not None, "every operation on the tape leads to the loss"
    return value.gradient
