"""What a strategy holds beside autograd: messages, gathered parameters and gradients.

A strategy's container copies gradients into messages, gathers parameters and frees both, at points
of the pass that its code determines. The classes here do the same with byte counts, in the same
order, driven by the tape of `paceline.accounting.memory.autograd_tape`. How long communication
takes has no part in it: memory is freed where the program drops it, after it has told the device to
wait.

    gradients       stay where backward allocated them, or are moved into buckets: at once in a pass
                    that is not averaged, otherwise in groups (`GROUP_BYTES`). Those of a second
                    pass are added in place
    torch's DDP     moves each gradient when it is complete. In a pass that is not averaged it moves
                    none: until the next pass there are gradients beside the buckets
    zero2           a message exists from its first gradients until the next one has been sent. In
                    a pass that is not averaged, whole gradients stay on every rank
    fsdp            the same for a layer's message, which is sent when backward has reached the
                    layer before; what has been received of it stays as the shard's gradient. A
                    pass that is not averaged keeps the messages. Two layers are gathered ahead, in
                    forward and backward; a layer is freed after its forward, except the last
    torch's FSDP2   one layer is everything outside of blocks. A layer is gathered into one buffer
                    and copied out of it. In forward, the buffer stays until the next layer has been
                    copied; in backward, the next layer is gathered before this one runs. The input
                    of a reduce-scatter stays until the next layer is averaged

gloo receives parts of a reduce-scatter from the other ranks; on an accelerator it is in place.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.accounting.buckets import GROUP_BYTES
from paceline.accounting.memory.autograd_tape import Buffer, Tape, Value

_LAYERS_AHEAD = 2


class LocalGradients:
    """Gradients stay where backward allocated them; those of later passes are added in place."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._averages = True
        self._index: dict[int, int] = {}
        self._local: dict[int, Buffer] = {}
        """Gradients that exist, by parameter, where backward allocated them."""

    def begin_pass(self, parameters: Sequence[Value], *, averages: bool) -> None:
        """Begins a pass, after which gradients are averaged or not."""
        self._averages = averages
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}

    def end_pass(self) -> None:
        """Ends the backward pass."""

    def take(self, parameter: Value, gradient: Buffer) -> None:
        """Accepts a complete gradient."""
        self._accept(self._index[id(parameter)], gradient)

    def before_forward(self, unit: int) -> None:
        """Is called before a unit's forward pass."""

    def after_forward(self, unit: int) -> None:
        """Is called after a unit's forward pass."""

    def before_backward(self, unit: int) -> None:
        """Is called before a unit's backward pass."""

    def _accept(self, index: int, gradient: Buffer) -> None:
        self._keep(index, gradient)

    def _keep(self, index: int, gradient: Buffer) -> None:
        if index in self._local:
            self._tape.release(gradient)
        else:
            self._local[index] = gradient


class MessagePlan(NamedTuple):
    """Gradients that are sent together."""

    num_tensors: int
    num_bytes: int = 0
    """Bytes of the message if it is freed after it has been sent."""
    arriving_bytes: int = 0
    """Bytes that arrive from the other ranks meanwhile."""


class Buckets(LocalGradients):
    """Gradients are moved into buckets in groups; buckets outlive the step, or are messages."""

    def __init__(self, tape: Tape, buckets: Sequence[MessagePlan], num_parameters: int) -> None:
        super().__init__(tape)
        self._buckets = buckets
        self._outlive = not any(bucket.num_bytes for bucket in buckets)
        backward = iter(range(num_parameters - 1, -1, -1))
        self._bucket_of = {
            next(backward): number
            for number, bucket in enumerate(buckets)
            for _ in range(bucket.num_tensors)
        }
        self._has_moved: set[int] = set()
        self._waiting: dict[int, list[Buffer]] = {}
        self._missing: dict[int, int] = {}
        self._messages: dict[int, Buffer] = {}
        self._sent: list[list[Buffer]] = []

    def begin_pass(self, parameters: Sequence[Value], *, averages: bool) -> None:
        """Begins a pass."""
        super().begin_pass(parameters, averages=averages)
        self._waiting = {number: [] for number in range(len(self._buckets))}
        self._missing = {number: each.num_tensors for number, each in enumerate(self._buckets)}

    def _accept(self, index: int, gradient: Buffer) -> None:
        if index in self._has_moved or (self._outlive and not self._averages):
            # It is added to its place in the bucket, or moved there at once.
            self._has_moved.add(index)
            self._tape.release(gradient)
            return
        self._keep(index, gradient)
        if self._averages:
            self._wait(index)

    def _wait(self, index: int) -> None:
        number = self._bucket_of[index]
        waiting = self._waiting[number]
        waiting.append(self._local.pop(index))
        if self._outlive:
            self._has_moved.add(index)
        self._missing[number] -= 1
        if self._missing[number] and sum(each.num_bytes for each in waiting) < GROUP_BYTES:
            return
        bucket = self._buckets[number]
        if bucket.num_bytes and number not in self._messages:
            self._messages[number] = self._tape.allocate(bucket.num_bytes)
        self._tape.release(*waiting)
        waiting.clear()
        if bucket.num_bytes and not self._missing[number]:
            self._send(number)

    def _send(self, number: int) -> None:
        """Sends a message, then receives the one before."""
        arriving = self._tape.allocate(self._buckets[number].arriving_bytes)
        self._sent.append([self._messages.pop(number), arriving])
        while len(self._sent) > 1:
            self._tape.release(*self._sent.pop(0))

    def end_pass(self) -> None:
        """Receives the last message."""
        while self._sent:
            self._tape.release(*self._sent.pop(0))


class TorchBuckets(LocalGradients):
    """torch's DDP: the buckets outlive the step; only an averaged pass moves gradients there."""

    def _accept(self, index: int, gradient: Buffer) -> None:
        self._keep(index, gradient)
        if self._averages:
            self._tape.release(self._local.pop(index))


class LayerPlan(NamedTuple):
    """Parameters that are gathered and averaged together; bytes."""

    full: int
    """All parameters, with padding."""
    message: int
    """All gradients, with padding."""
    shard: int
    """This rank's part of the message."""


class ShardedLayers(LocalGradients):
    """fsdp: layers are gathered, freed and sent as in `paceline.parallel.fsdp.schedule`."""

    def __init__(
        self,
        tape: Tape,
        layers: Sequence[LayerPlan],
        *,
        layer_of: Sequence[int],
        layer_of_unit: Sequence[int],
        receives: bool,
    ) -> None:
        super().__init__(tape)
        self._layers = layers
        self._layer_of = layer_of
        """The layer of each parameter."""
        self._layer_of_unit = layer_of_unit
        self._receives = receives
        """Whether the other ranks' parts of a message need memory."""
        self._gathered: dict[int, Buffer] = {}
        self._open: dict[int, Buffer] = {}
        self._kept: dict[int, Buffer] = {}
        self._sent: list[tuple[int, list[Buffer]]] = []
        self._reached = len(layer_of_unit)

    def begin_pass(self, parameters: Sequence[Value], *, averages: bool) -> None:
        """Begins a pass."""
        super().begin_pass(parameters, averages=averages)
        self._reached = len(self._layer_of_unit)

    def _gather(self, units: range) -> None:
        for unit in units:
            if 0 <= unit < len(self._layer_of_unit):
                layer = self._layer_of_unit[unit]
                if layer not in self._gathered:
                    self._gathered[layer] = self._tape.allocate(self._layers[layer].full)

    def _free(self, layer: int) -> None:
        if layer in self._gathered:
            self._tape.release(self._gathered.pop(layer))

    def before_forward(self, unit: int) -> None:
        """Gathers a layer and the next ones."""
        self._gather(range(unit, unit + 1 + _LAYERS_AHEAD))

    def after_forward(self, unit: int) -> None:
        """Frees a layer, except the last, and those that the next units need."""
        following = self._layer_of_unit[unit + 1 : unit + 1 + _LAYERS_AHEAD]
        if following and self._layer_of_unit[unit] not in following:
            self._free(self._layer_of_unit[unit])

    def before_backward(self, unit: int) -> None:
        """Frees and sends the layers behind, and gathers this one and the next ones."""
        while self._reached > unit:
            if self._reached < len(self._layer_of_unit):
                layer = self._layer_of_unit[self._reached]
                if self._layer_of_unit.index(layer) == self._reached:
                    self._free(layer)
                    self._send(layer)
            self._reached -= 1
            self._gather(range(self._reached, self._reached - _LAYERS_AHEAD - 1, -1))

    def _accept(self, index: int, gradient: Buffer) -> None:
        layer = self._layer_of[index]
        messages = self._open if self._averages else self._kept
        if layer not in messages:
            messages[layer] = self._tape.allocate(self._layers[layer].message)
        self._tape.release(gradient)

    def _send(self, layer: int) -> None:
        if not self._averages:
            return
        message = self._open.pop(layer)
        if layer in self._kept:  # It is added to what earlier passes have kept.
            self._tape.release(message)
            message = self._kept.pop(layer)
        sizes = self._layers[layer]
        arriving = self._tape.allocate((sizes.message - sizes.shard) * self._receives)
        self._sent.append((layer, [message, arriving]))
        if len(self._sent) > 1:
            self._receive()

    def _receive(self) -> None:
        layer, message = self._sent.pop(0)
        self._tape.allocate(self._layers[layer].shard)  # It stays as the shard's gradient.
        self._tape.release(*message)

    def end_pass(self) -> None:
        """Sends and receives the rest."""
        self.before_backward(-1)
        while self._sent:
            self._receive()


class TorchLayers(LocalGradients):
    """torch's FSDP2; the first layer is everything outside of blocks."""

    def __init__(
        self,
        tape: Tape,
        layers: Sequence[LayerPlan],
        layer_of: Sequence[int],
        num_blocks: int,
        *,
        reshards: bool = True,
    ) -> None:
        super().__init__(tape)
        self._reshards = reshards
        """Whether blocks are freed between forward and backward."""
        self._layers = layers
        self._layer_of = layer_of
        self._num_blocks = num_blocks
        self._full: dict[int, Buffer] = {}
        self._results: dict[int, Buffer] = {}
        """What an all-gather has received, by layer, before it is copied out."""
        self._last_result: list[Buffer] = []
        self._sent: list[Buffer] = []
        self._has_shards: set[int] = set()

    def _layer(self, unit: int) -> int:
        return unit if 1 <= unit <= self._num_blocks else 0

    def _start(self, layer: int) -> None:
        if layer not in self._full and layer not in self._results:
            self._results[layer] = self._tape.allocate(self._layers[layer].full)

    def _copy_out(self, layer: int) -> None:
        self._full[layer] = self._tape.allocate(self._layers[layer].full)

    def before_forward(self, unit: int) -> None:
        """Gathers a layer; the result of its all-gather stays until the next is copied out."""
        layer = self._layer(unit)
        if layer in self._full:
            return
        self._start(layer)
        self._copy_out(layer)
        # torch drops it before, but a local variable still holds it.
        self._tape.release(*self._last_result)
        self._last_result = [self._results.pop(layer)]

    def after_forward(self, unit: int) -> None:
        """Frees a block; the end of the model frees the last result."""
        if self._layer(unit):
            if self._reshards:
                self._tape.release(self._full.pop(unit))
        elif unit > self._num_blocks + 1:
            self._tape.release(*self._last_result)
            self._last_result = []

    def before_backward(self, unit: int) -> None:
        """Averages the block behind, copies this block out, and gathers the next one."""
        if unit > self._num_blocks + 1:
            self._start(self._num_blocks)
            return
        if self._layer(unit + 1):
            self._finish(unit + 1)
        if not self._layer(unit):
            return
        self._start(unit)
        if unit in self._results:
            self._copy_out(unit)
            self._tape.release(self._results.pop(unit))
        if unit > 1:
            self._start(unit - 1)

    def _finish(self, layer: int) -> None:
        """Ends a layer's backward pass."""
        self._tape.release(self._full.pop(layer))
        if not self._averages:
            return
        self._tape.release(*self._sent)
        self._sent = [self._tape.allocate(self._layers[layer].message)]
        own = [index for index, each in enumerate(self._layer_of) if each == layer]
        self._tape.release(*(self._local.pop(index) for index in own if index in self._local))
        self._tape.allocate(self._layers[layer].shard)

    def end_pass(self) -> None:
        """Ends the backward pass of what is outside of blocks."""
        self._finish(0)
        self._tape.release(*self._sent)
        self._sent = []
