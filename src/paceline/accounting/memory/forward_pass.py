"""The operations of a forward pass, with the memory that each saves and its derivative allocates.

These are the operations that torch runs eagerly for `paceline.models.TransformerLM` and its loss.
With a dtype below float32, norms, rotations, softmax and loss are still computed in float32, and
every change of dtype is an operation that allocates a copy. On an accelerator, a norm is one
operation; on a CPU, torch composes it of several.
"""

import dataclasses

from paceline.accounting.counts import block_parameters
from paceline.accounting.memory.autograd_tape import Buffer, Tape, Value
from paceline.accounting.memory.model_states import parameter_sizes
from paceline.core.specs import (
    AttentionImplementation,
    BatchShape,
    ModelShape,
    Precision,
    bytes_per_element,
)

_FLOAT32_BYTES = 4
# torch saves a Python number as a float64 scalar.
_SCALAR_BYTES = 8
# Size of what torch.get_rng_state returns on a CPU.
_GENERATOR_STATE_BYTES = 5056


@dataclasses.dataclass
class ForwardPass:
    """Records a forward pass on a tape."""

    tape: Tape
    shape: ModelShape
    batch: BatchShape
    precision: Precision
    attention: AttentionImplementation
    recomputes_blocks: bool
    """Whether blocks save only their inputs."""
    on_accelerator: bool = False

    def __post_init__(self) -> None:
        self._tokens = self.batch.tokens_per_pass
        self._stream = bytes_per_element(self.precision.parameters)
        self._multiplied = bytes_per_element(self.precision.compute)
        self._runs_again = False
        self._copies: dict[int, Value] = {}
        """Weights cast by autocast, valid until it ends; by parameter."""
        # Nothing is allocated: weights always exist. Only their gradients are counted.
        self.parameters = [
            Value(Buffer(size * self._stream), is_parameter=True)
            for size in parameter_sizes(self.shape)
        ]
        """The model's parameters, in model order."""

    def loss(self) -> Value:
        """Records everything up to the loss, which the caller holds.

        Its units are the embedding, each block, the final norm, and the head.
        """
        parameters = iter(self.parameters)
        embedding = next(parameters)
        self.tape.begin_unit(0)
        x = self.tape.operate(
            [embedding],
            self._tokens * self.shape.d_model * self._stream,
            gradient_bytes=[embedding.buffer.num_bytes],
        )
        self.tape.end_unit(0)
        names = block_parameters(self.shape)
        for unit in range(1, 1 + self.shape.num_layers):
            block = {name: next(parameters) for name in names}
            self.tape.begin_unit(unit)
            following = self._block_or_checkpoint(x, block)
            self.tape.end_unit(unit)
            self.tape.drop(x)
            x = following
        norm, head = self.shape.num_layers + 1, self.shape.num_layers + 2
        self.tape.begin_unit(norm)
        normed = self._norm(x, next(parameters))
        self.tape.end_unit(norm)
        self.tape.begin_unit(head)
        logits = self._linear(normed, next(parameters, embedding), self.shape.vocab_size)
        self.tape.end_unit(head)
        self.tape.drop(normed, x)
        self._end_autocast()
        loss = self._cross_entropy(logits)
        self.tape.drop(logits)
        return loss

    def _block_or_checkpoint(self, x: Value, block: dict[str, Value]) -> Value:
        if not self.recomputes_blocks:
            return self._block(x, block)

        def run(stream: Value, again: bool) -> Value:
            self._runs_again = again
            output = self._block(stream, block)
            self._runs_again = False
            return output

        # A Python number is not a tensor, so a checkpoint does not drop it.
        number = _SCALAR_BYTES * (self.attention == "naive")
        # Both are in the host's memory.
        state_bytes = 0 if self.on_accelerator else _GENERATOR_STATE_BYTES + number
        return self.tape.checkpoint(run, x, state_bytes)

    def _end_autocast(self) -> None:
        self.tape.drop(*self._copies.values())
        self._copies.clear()

    def _block(self, x: Value, block: dict[str, Value]) -> Value:
        tape = self.tape
        normed = self._norm(x, block["attention_norm"])
        mixed = self._attention(normed, block)
        tape.drop(normed)
        middle = self._add(x, mixed)
        tape.drop(mixed)
        normed = self._norm(middle, block["feed_forward_norm"])
        mixed = self._feed_forward(normed, block)
        tape.drop(normed)
        if self._runs_again:
            self._end_autocast()
        output = self._add(middle, mixed, is_needed=not self._runs_again)
        tape.drop(mixed, middle)
        return output

    def _add(self, stream: Value, mixed: Value, *, is_needed: bool = True) -> Value:
        same = self._stream == self._multiplied
        num_elements = self._tokens * self.shape.d_model
        return self.tape.operate(
            [stream, mixed],
            num_elements * self._stream * is_needed,
            gradient_bytes=[None, None if same else num_elements * self._multiplied],
        )

    def _norm(self, x: Value, weight: Value) -> Value:
        """Divides by the root mean square, in float32."""
        tape, width = self.tape, self.shape.d_model
        rows = self._tokens * _FLOAT32_BYTES
        exact = self._cast(x, self._tokens * width, self._stream, _FLOAT32_BYTES)
        scale = self._cast(weight, width, self._stream, _FLOAT32_BYTES, is_weight=True)
        if self.on_accelerator:
            scaled = self._fused_norm(exact, scale, rows)
        else:
            scaled = self._composed_norm(exact, scale, rows)
        tape.drop(exact, *self._if_copied(scale))
        normed = self._cast(scaled, self._tokens * width, _FLOAT32_BYTES, self._stream)
        tape.drop(scaled)
        return normed

    def _fused_norm(self, exact: Value, scale: Value, rows: int) -> Value:
        """Saves the input and, for each row, the inverse of its root mean square."""
        tape, width = self.tape, self.shape.d_model
        root = Value(tape.allocate(rows))
        scaled = tape.operate(
            [exact, scale],
            rows * width,
            keeps=[exact, root, *self._if_copied(scale)],
            gradient_bytes=[rows * width, width * _FLOAT32_BYTES],
        )
        tape.drop(root)
        return scaled

    def _composed_norm(self, exact: Value, scale: Value, rows: int) -> Value:
        tape, width = self.tape, self.shape.d_model
        full = rows * width
        squares = tape.operate(
            [exact], full, keeps=[exact], gradient_bytes=[full], working_bytes=2 * full
        )
        mean = tape.operate([squares], rows, gradient_bytes=[full])
        tape.drop(squares)
        root = tape.operate(
            [mean], rows, keeps_output=True, gradient_bytes=[rows], working_bytes=rows
        )
        tape.drop(mean)
        pair = [exact, root]
        unit = tape.operate(pair, full, keeps=pair, gradient_bytes=[full, rows], working_bytes=full)
        tape.drop(root)
        scaled = tape.operate(
            [unit, scale],
            full,
            keeps=[unit, *self._if_copied(scale)],
            gradient_bytes=[full, width * _FLOAT32_BYTES],
            working_bytes=full,
        )
        tape.drop(unit)
        return scaled

    def _cast(
        self, value: Value, num_elements: int, old: int, new: int, *, is_weight: bool = False
    ) -> Value:
        """Changes the dtype; the caller holds the result even if it is the same tensor."""
        if old == new:
            if not value.is_parameter:
                self.tape.hold(value.buffer)
            return value
        return self.tape.operate(
            [value],
            num_elements * new,
            gradient_bytes=[num_elements * old],
            kind="weight_copy" if is_weight else "activation",
        )

    def _if_copied(self, weight: Value) -> list[Value]:
        return [] if weight.is_parameter else [weight]

    def _linear(
        self, x: Value, weight: Value, num_columns: int, *, is_needed: bool = True
    ) -> Value:
        """Multiplies by a weight; autocast copies the input each time, but the weight only once."""
        tape = self.tape
        num_weights = weight.buffer.num_bytes // self._stream
        operand = weight
        if self._stream != self._multiplied:
            if id(weight) not in self._copies:
                self._copies[id(weight)] = self._cast(
                    weight, num_weights, self._stream, self._multiplied, is_weight=True
                )
            operand = self._copies[id(weight)]
        num_inputs = self._tokens * (num_weights // num_columns)
        copy = self._cast(x, num_inputs, x.buffer.num_bytes // num_inputs, self._multiplied)
        product = tape.operate(
            [copy, operand],
            self._tokens * num_columns * self._multiplied * is_needed,
            keeps=[copy, *self._if_copied(operand)],
            gradient_bytes=[num_inputs * self._multiplied, num_weights * self._multiplied],
            gives_views=True,
        )
        tape.drop(copy)
        return product

    def _attention(self, x: Value, block: dict[str, Value]) -> Value:
        tape, shape = self.tape, self.shape
        query = self._rotated(x, block["query"], shape.attention_width)
        key = self._rotated(x, block["key"], shape.key_value_width)
        value = self._linear(x, block["value"], shape.key_value_width)
        if self.attention == "naive":
            mixed = self._scored(query, key, value)
        else:
            mixed = self._fused(query, key, value)
        tape.drop(query, key, value)
        # The output is stored head by head. With one head, or one token per sequence, that is
        # token by token as well.
        joined = self._copied(mixed, shape.num_heads > 1 and self.batch.context_length > 1)
        output = self._linear(joined, block["output"], shape.d_model)
        tape.drop(joined, mixed)
        return output

    def _rotated(self, x: Value, weight: Value, width: int) -> Value:
        """Projects, then rotates pairs of channels in float32; saves only the tables."""
        tape, num_elements = self.tape, self._tokens * width
        full = num_elements * _FLOAT32_BYTES
        projected = self._linear(x, weight, width)
        exact = self._cast(projected, num_elements, self._multiplied, _FLOAT32_BYTES)
        # Temporaries: four products of half the width, or two sums of them and the result.
        tape.release(tape.allocate(full))
        rotated = tape.operate([exact], full, gradient_bytes=[full], working_bytes=full)
        tape.drop(exact)
        result = self._cast(rotated, num_elements, _FLOAT32_BYTES, self._multiplied)
        tape.drop(rotated, projected)
        return result

    def _fused(self, query: Value, key: Value, value: Value) -> Value:
        """Records attention that saves one number per query instead of scores."""
        inputs = [query, key, value]
        sums = Value(self.tape.allocate(self._tokens * self.shape.num_heads * _FLOAT32_BYTES))
        mixed = self.tape.operate(
            inputs,
            query.buffer.num_bytes,
            keeps=[*inputs, sums],
            keeps_output=True,
            gradient_bytes=[part.buffer.num_bytes for part in inputs],
        )
        self.tape.drop(sums)
        return mixed

    def _copied(self, value: Value, is_copied: bool) -> Value:
        """Reorders elements; without `is_copied` they are in order, and the result is a view."""
        num_bytes = value.buffer.num_bytes if is_copied else None
        return self.tape.operate([value], num_bytes, gradient_bytes=[None])

    def _scored(self, query: Value, key: Value, value: Value) -> Value:
        """Records attention that saves its probabilities and, per layer, a length² byte mask."""
        tape, length = self.tape, self.batch.context_length
        num_scores = self._tokens * self.shape.num_heads * length
        low, full = num_scores * self._multiplied, num_scores * _FLOAT32_BYTES
        key, value = self._repeated(key), self._repeated(value)
        widths = query.buffer.num_bytes
        products = tape.operate(
            [query, key], low, keeps=[query, key], gradient_bytes=[widths, widths]
        )
        factor = Value(tape.allocate(_SCALAR_BYTES, "unseen"))
        # In recomputation, the block's first run has saved the number already.
        numbers = [] if self._runs_again else [factor]
        scores = tape.operate([products], low, keeps=numbers, gradient_bytes=[low])
        tape.drop(products, factor)
        mask = Value(tape.allocate(length**2))
        hidden = tape.operate([scores], low, keeps=[mask], gradient_bytes=[low])
        tape.drop(scores, mask)
        exact = self._cast(hidden, num_scores, self._multiplied, _FLOAT32_BYTES)
        softmax = tape.operate([exact], full, keeps_output=True, gradient_bytes=[full])
        tape.drop(exact)
        probabilities = self._cast(softmax, num_scores, _FLOAT32_BYTES, self._multiplied)
        # Values are stored token by token, but multiplied head by head. Repeated heads are in that
        # order already; so is a single head, a single token, or a single sequence.
        shape, batch = self.shape, self.batch
        several = 1 not in (shape.num_heads, batch.context_length, batch.num_sequences)
        ordered = self._copied(value, shape.num_heads == shape.key_value_heads and several)
        pair = [probabilities, ordered]
        mixed = tape.operate(pair, widths, keeps=pair, gradient_bytes=[low, widths])
        tape.drop(ordered, probabilities, softmax, hidden, key, value)
        return mixed

    def _repeated(self, value: Value) -> Value:
        """Copies each key-value head once for every query head that shares it."""
        group = self.shape.num_heads // self.shape.key_value_heads
        if group == 1:
            self.tape.hold(value.buffer)
            return value
        return self.tape.operate(
            [value], value.buffer.num_bytes * group, gradient_bytes=[value.buffer.num_bytes]
        )

    def _feed_forward(self, x: Value, block: dict[str, Value]) -> Value:
        tape = self.tape
        gate = self._linear(x, block["gate"], self.shape.d_ff)
        size = gate.buffer.num_bytes
        active = tape.operate([gate], size, keeps=[gate], gradient_bytes=[size])
        tape.drop(gate)
        up = self._linear(x, block["up"], self.shape.d_ff)
        product = tape.operate([active, up], size, keeps=[active, up], gradient_bytes=[size, size])
        tape.drop(active, up)
        # Recomputation of a block stops once this operation has saved its inputs.
        down = self._linear(
            product, block["down"], self.shape.d_model, is_needed=not self._runs_again
        )
        tape.drop(product)
        return down

    def _cross_entropy(self, logits: Value) -> Value:
        tape, num_logits = self.tape, self._tokens * self.shape.vocab_size
        full = num_logits * _FLOAT32_BYTES
        exact = self._cast(logits, num_logits, self._multiplied, _FLOAT32_BYTES)
        log_probabilities = tape.operate([exact], full, keeps_output=True, gradient_bytes=[full])
        weights = Value(tape.allocate(_FLOAT32_BYTES))
        loss = tape.operate(
            [log_probabilities],
            _FLOAT32_BYTES,
            keeps=[log_probabilities, weights],
            gradient_bytes=[full],
        )
        tape.drop(weights, log_probabilities, exact)
        return loss
