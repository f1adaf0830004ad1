"""A tape of the operations of a forward pass, played back to count what backward holds.

Autograd works like this: an operation keeps the tensors that its derivative needs; backward goes
through the operations in the opposite order, gives each the gradient of its result, takes the
gradients of its inputs, and lets go of what was kept. A gradient that arrives where there is
already one is added to it in place, unless that one is a view. The tape does the same with numbers
of bytes in place of tensors, so that what is held can be asked for at any instant, and the most of
all instants.

Every tensor is a `Buffer`, which counts who holds it: variables of the program, operations that
keep it, gradients on their way. Parameters, tables and tokens are there in any case and are not
counted; copies of parameters in another dtype are, under their own name.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["activation", "weight_copy", "unseen"]
"""unseen is what is kept, but not as a tensor that autograd's hooks see."""


@dataclasses.dataclass(eq=False)
class Buffer:
    """A piece of memory, and how many hold it."""

    num_bytes: int
    kind: Kind = "activation"
    holders: int = 1
    is_view: bool = False
    """Whether the tensor is another one, seen differently."""


@dataclasses.dataclass(eq=False)
class Value:
    """A result or parameter that a gradient may arrive at."""

    buffer: Buffer
    is_parameter: bool = False
    num_uses: int = 0
    """Operations on the tape that take it."""
    num_arrived: int = 0
    gradient: Buffer | None = None


@dataclasses.dataclass(eq=False)
class GradientBucket:
    """Gradients that are sent together."""

    num_bytes: int
    """Bytes that are allocated with its first gradient and freed with its last; none of a bucket
    that outlives the step, which is not counted here."""
    num_missing: int
    """Number of its gradients that are not there yet."""
    arriving_bytes: int
    """What the other ranks send of theirs, while it is there."""
    group_bytes: int
    """Bytes of gradients from which on they move into the bucket; the last ones do in any case."""
    waiting: list[Buffer] = dataclasses.field(default_factory=list)
    buffer: Buffer | None = None


class Operation(NamedTuple):
    """What one operation keeps, and what its derivative makes."""

    inputs: Sequence[Value]
    output: Value
    kept: Sequence[Buffer]
    gradient_bytes: Sequence[int | None]
    """Of each input's gradient; None where it is the very tensor that the operation was given."""
    working_bytes: int = 0
    """What the derivative needs beside its results."""
    gives_views: bool = False
    """Whether the gradients are seen differently before they arrive."""
    again: "Callable[[Value, bool], Value] | None" = None
    """Where nothing else is kept: computes the result anew from the one input."""


class Tape:
    """Records operations, plays them back, and knows the most bytes that there were.

    With `keeps_gradients` parameters' gradients stay where they are made; otherwise each goes as
    soon as it is complete, or with others of its bucket.
    """

    def __init__(self, *, keeps_gradients: bool = False) -> None:
        self.peak_bytes = 0
        self.peak_before_mark_bytes = 0
        """The most until backward came to the mark; the other is the most from then on."""
        self._recording = True
        self._mark: int | None = None
        self._keeps_gradients = keeps_gradients
        self._live_bytes = 0
        self._operations: list[Operation] = []
        self._buckets: dict[int, GradientBucket] = {}

    def collect(
        self, parameters: Sequence[Value], num_bytes: int, arriving_bytes: int, group_bytes: int
    ) -> None:
        """Lets these parameters' gradients move into one bucket: see `GradientBucket`."""
        bucket = GradientBucket(num_bytes, len(parameters), arriving_bytes, group_bytes)
        self._buckets |= {id(parameter): bucket for parameter in parameters}

    def allocate(self, num_bytes: int, kind: Kind = "activation") -> Buffer:
        """Makes a buffer that its maker holds."""
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return Buffer(num_bytes, kind)

    def hold(self, buffer: Buffer) -> Buffer:
        """Counts one more holder."""
        buffer.holders += 1
        return buffer

    def release(self, *buffers: Buffer) -> None:
        """Counts one holder less of each; with the last, the memory is free."""
        for buffer in buffers:
            buffer.holders -= 1
            if buffer.holders == 0:
                self._live_bytes -= buffer.num_bytes

    def drop(self, *values: Value) -> None:
        """Lets go of variables of the program."""
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
        """Does an operation and returns its result, which the caller holds.

        Other operands than the `inputs`, which get a gradient, need not be named. The result has
        `num_bytes`; with None it is the first input, seen differently. The derivative needs the
        operands that are in `keeps`, and with `keeps_output` the result. The rest: see `Operation`.
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

    def set_mark(self) -> None:
        """Divides the tape here: backward is asked for its peaks on both sides."""
        self._mark = len(self._operations)

    def kept_bytes(self, kind: Kind) -> int:
        """Returns what the operations on the tape keep, each buffer counted once."""
        kept = {id(buffer): buffer for done in self._operations for buffer in done.kept}
        return sum(buffer.num_bytes for buffer in kept.values() if buffer.kind == kind)

    def checkpoint(
        self, run: Callable[[Value, bool], Value], value: Value, state_bytes: int
    ) -> Value:
        """Runs operations of which only the input is kept; backward runs them again.

        The flag of `run` says that they run again, and may stop as soon as everything that was to
        be kept exists. `state_bytes` are kept beside the input `value`, unknown to autograd.
        """
        self._recording = False
        output = run(value, False)
        self._recording = True
        state = self.allocate(state_bytes, "unseen")
        self._record(Operation([value], output, [value.buffer, state], [None], again=run))
        self.release(state)
        return output

    def play_back(self, output: Value, gradient: Buffer) -> None:
        """Goes through backward with the gradient of the last result, and empties the tape."""
        self._arrive(output, gradient)
        while self._operations:
            if len(self._operations) == self._mark:
                self._mark = None
                self.peak_before_mark_bytes, self.peak_bytes = self.peak_bytes, self._live_bytes
            operation = self._operations.pop()
            if operation.again is None:
                gradients = self._differentiate(operation)
            else:
                gradients = [self._run_again(operation.again, operation)]
            self.release(*operation.kept)
            for value, of_input in zip(operation.inputs, gradients, strict=True):
                self._arrive(value, of_input)

    def _differentiate(self, operation: Operation) -> list[Buffer]:
        """Makes the gradients of the inputs from that of the result."""
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
        """Records the operations once more, plays them back, and returns the input's gradient."""
        before, self._operations = self._operations, []
        copy = Value(operation.inputs[0].buffer)
        output = run(copy, True)
        self.drop(output)
        self.play_back(output, _gradient(operation.output))
        self._operations = before
        return _gradient(copy)

    def _arrive(self, value: Value, gradient: Buffer) -> None:
        """Adds a gradient to what has arrived at a value; a parameter's may then be complete."""
        if value.gradient is None:
            value.gradient = gradient
        elif value.gradient.holders == 1 and not value.gradient.is_view:
            self.release(gradient)
        else:
            # Somebody else may still read the first, so that nothing is added to it in place.
            total = self.allocate(gradient.num_bytes)
            self.release(value.gradient, gradient)
            value.gradient = total
        value.num_arrived += 1
        if value.is_parameter and value.num_arrived == value.num_uses:
            self._complete(value, value.gradient)

    def _complete(self, parameter: Value, gradient: Buffer) -> None:
        """Moves a parameter's gradient to where it belongs."""
        bucket = self._buckets.get(id(parameter))
        if bucket is None:
            if not self._keeps_gradients:
                self.release(gradient)
            return
        bucket.waiting.append(gradient)
        bucket.num_missing -= 1
        waiting_bytes = sum(waiting.num_bytes for waiting in bucket.waiting)
        if bucket.num_missing and waiting_bytes < bucket.group_bytes:
            return
        if bucket.buffer is None:
            bucket.buffer = self.allocate(bucket.num_bytes)
        self.release(*bucket.waiting)
        bucket.waiting.clear()
        if not bucket.num_missing:
            self.release(self.allocate(bucket.arriving_bytes), bucket.buffer)


def _gradient(value: Value) -> Buffer:
    assert value.gradient is not None, "every operation on the tape leads to the loss"
    return value.gradient
