"""Maps the names in a trace to integers, with the role, kind of work and rank of each event.

torch records operators (``cpu_op``), GPU kernels and copies, and annotations. gloo's collectives
are annotations on a separate thread. nccl's collectives are kernels; the host calls of the same
name only launch them. An operator's kind of work follows from its name, and its FLOPs from the
shapes of its inputs. Operators are numbered, and a kernel has the number of the operator that
launched it.

torch also draws the annotations on the device. Each shows only what its own thread launched outside
of inner annotations, so that a backward pass has nearly nothing: they are not used.
"""

import enum
import math
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.ranges import step_label
from paceline.traces.reader import Event, TraceError


class OpClass(enum.StrEnum):
    """Kinds of work, as shown in tables."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    SOFTMAX = "softmax"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    INDEXING = "indexing"
    COPY = "copy"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    OTHER = "other"


# The first pattern found in the lower-case name wins: torch operators, then kernels.
_PATTERNS: tuple[tuple[OpClass, str], ...] = (
    (
        OpClass.COMMUNICATION,
        r"^(nccl|rccl|gloo:|_?c10d(_functional)?::|record_param_comms|ncclkernel|mpi:)",
    ),
    (OpClass.OPTIMIZER, r"adam|sgd_|multi_tensor_apply|optimizer\.step|lamb_|muon"),
    (
        OpClass.ATTENTION,
        r"scaled_dot_product|flash_(fwd|bwd|attn|attention)|fmha|attn_(fwd|bwd)"
        r"|^paceline::attention|^attention_\w+_kernel",
    ),
    (OpClass.SOFTMAX, r"softmax"),
    (
        OpClass.MATMUL,
        r"aten::(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|einsum|dot|mv|_int_mm|_scaled_mm)\b"
        r"|gemm|gemv|cutlass|xmma|cublas|wgmma|nvjet|mkldnn_linear",
    ),
    (OpClass.INDEXING, r"index|embedding|gather|scatter|masked_fill|where|nll_loss|one_hot"),
    (
        OpClass.REDUCTION,
        r"aten::(sum|mean|amax|amin|max|min|norm|linalg_vector_norm|logsumexp|var|all|any|cumsum"
        r"|native_layer_norm\w*|_fused_rms_norm\w*|rms_norm|layer_norm)\b|reduce|rms_?norm"
        r"|layer_?norm",
    ),
    (
        OpClass.COPY,
        r"memcpy|memset|aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|fill_|zero_|zeros"
        r"|zeros_like|ones_like|ones|arange)\b|catarray|copy_kernel",
    ),
    (
        OpClass.ELEMENTWISE,
        r"aten::(add|sub|mul|div|neg|exp|exp2|log|sqrt|rsqrt|pow|silu|gelu|sigmoid|tanh|relu"
        r"|silu_backward|gelu_backward|threshold_backward|sigmoid_backward|cos|sin|rsub|reciprocal"
        r"|clamp|addcmul|addcdiv|lerp|dropout|native_dropout|bitwise_\w+|eq|ne|lt|gt|le|ge|tril"
        r"|triu|isnan|abs|maximum|minimum|_foreach_\w+)_?\b|elementwise|vectorized",
    ),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)


def op_class_of(name: str) -> OpClass:
    """Returns the kind of work of an operator or kernel."""
    lower = name.lower()
    return next((kind for kind, pattern in _COMPILED if pattern.search(lower)), OpClass.OTHER)


def matmul_flops(name: str, input_dims: bytes) -> int:
    """Returns the FLOPs of a matmul operator, 2 per multiply-add; 0 for other operators.

    `input_dims` is the profiler's JSON list of input shapes.
    """
    if name not in _MATMULS or not input_dims:
        return 0
    left, right, outputs, count = _MATMULS[name]
    try:
        shapes = msgspec.json.decode(input_dims, type=list[list[int]])
        flops = count * 2 * math.prod(shapes[left]) * shapes[right][outputs]
    except (msgspec.DecodeError, IndexError, RecursionError):
        return 0
    # Ignore impossible shapes, as in a damaged trace.
    return flops if 0 <= flops < _MAX_FLOPS else 0


_MAX_FLOPS = 10**18  # One second of the largest existing machines.

# Indices of the two factors among an operator's inputs, the dimension of the second one that the
# result inherits, and the number of such matmuls. Attention has matmuls of (length x length x
# width) per head: two in forward, five in backward, of which one is recomputed.
_MATMULS = {
    "aten::mm": (0, 1, -1, 1),
    "aten::bmm": (0, 1, -1, 1),
    "aten::addmm": (1, 2, -1, 1),
    "aten::baddbmm": (1, 2, -1, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 1, -2, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 2, -2, 5),
}


EVENT = np.dtype(
    [("start", "i8"), ("end", "i8"), ("key", "u4"), ("thread", "u4"), ("operator", "i8")]
)
"""An event: start and end in nanoseconds, key and thread as indices into the catalog, and the
number of its operator; 0 if it has none."""

EventTable = npt.NDArray[np.void]

_MAX_NAMES = 2**17
_MAX_THREADS = 2**16
_MAX_RANKS = 2**10
_MAX_MOMENT_US = 2.0**50
_MAX_OPERATORS = 2**62
PROFILER_STEP = "ProfilerStep"
"""Prefix of the names of the profiler's own steps."""

_RANK_NAME = re.compile(rb'"rank (\d{1,9})"')
_IGNORED = -1


FUNCTIONAL_WAIT = "_c10d_functional::wait_tensor"
"""The operator that waits for a DTensor collective, often nested inside another operator."""


class Role(enum.IntEnum):
    """The role of an event on the timeline."""

    HOST_WORK = 0
    DEVICE_WORK = 1
    HOST_COMMUNICATION = 2
    DEVICE_COMMUNICATION = 3
    HOST_RANGE = 4


_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_ROLES = {
    "cpu_op": Role.HOST_WORK,
    **dict.fromkeys(_DEVICE_WORK, Role.DEVICE_WORK),
    "user_annotation": Role.HOST_RANGE,
}


class Key(NamedTuple):
    """Properties shared by events with the same name and input shapes."""

    role: Role
    name: str
    op_class: OpClass
    flops: int


class Catalog:
    """The names, threads and ranks of one trace; the path is used in error messages."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.keys: list[Key] = []
        self._roles = np.empty(0, dtype=np.int64)
        self._flops = np.empty(0, dtype=np.int64)
        self._numbers: dict[tuple[str, str, bytes], int] = {}
        self._threads: dict[tuple[int | str, int | str], int] = {}
        self._rank_of_process: dict[int | str, int] = {}
        self._steps: dict[int, str] = {}
        self._profiler_steps: dict[int, str] = {}

    def number(self, events: Sequence[Event]) -> EventTable:
        """Converts the relevant events to a table of integers."""
        keys: list[int] = []
        threads: list[int] = []
        begins: list[float] = []
        durations: list[float] = []
        operators: list[int] = []
        numbers, known_threads = self._numbers, self._threads
        for event in events:
            if event.ph != "X":
                if event.ph == "M":
                    self._learn_rank(event)
                continue
            input_dims = b"" if event.args is None else bytes(event.args.input_dims)
            identity = (event.cat, event.name, input_dims)
            key = numbers.get(identity)
            if key is None:
                key = self._add_name(identity)
            if key == _IGNORED:
                continue
            thread = known_threads.get((event.pid, event.tid))
            if thread is None:
                thread = self._add_thread(event)
            keys.append(key)
            threads.append(thread)
            begins.append(event.ts)
            durations.append(event.dur)
            operator = None if event.args is None else event.args.operator
            if not isinstance(operator, int) or not 0 < operator < _MAX_OPERATORS:
                operator = 0
            operators.append(operator)
        table = np.empty(len(keys), dtype=EVENT)
        table["key"], table["thread"], table["operator"] = keys, threads, operators
        begin, duration = np.array(begins), np.array(durations)
        is_wrong = (np.abs(begin) > _MAX_MOMENT_US) | (duration < 0) | (duration > _MAX_MOMENT_US)
        if is_wrong.any():
            wrong = int(np.argmax(is_wrong))
            raise TraceError(
                f"{self._path}: event {self.keys[keys[wrong]].name[:80]!r} begins at "
                f"{begins[wrong]} us and takes {durations[wrong]} us, which is impossible"
            )
        table["start"] = np.rint(begin * 1e3)
        table["end"] = table["start"] + np.rint(duration * 1e3).astype(np.int64)
        return table

    def step_labels(self) -> dict[int, str]:
        """Returns the labels of step ranges by key: Paceline's, or else the profiler's."""
        return self._steps or self._profiler_steps

    def rank_of_thread(self) -> npt.NDArray[np.int64]:
        """Returns each thread's rank; 0 for all threads if the trace is not merged."""
        return np.array(
            [self._rank_of_process.get(process, 0) for process, _ in self._threads], dtype=np.int64
        )

    def roles(self) -> npt.NDArray[np.int64]:
        """Returns the role of each key."""
        if self._roles.size != len(self.keys):
            self._roles = np.array([key.role for key in self.keys], dtype=np.int64)
        return self._roles

    def flops(self) -> npt.NDArray[np.int64]:
        """Returns the FLOPs of each key."""
        if self._flops.size != len(self.keys):
            self._flops = np.array([key.flops for key in self.keys], dtype=np.int64)
        return self._flops

    def _add_name(self, identity: tuple[str, str, bytes]) -> int:
        category, name, input_dims = identity
        role = _role_of(category, name)
        if role is None:
            number = _IGNORED
        elif len(self.keys) >= _MAX_NAMES:
            raise TraceError(
                f"{self._path}: more than {_MAX_NAMES} different names and shapes of inputs"
            )
        else:
            number = len(self.keys)
            self.keys.append(Key(role, name, op_class_of(name), matmul_flops(name, input_dims)))
            if role == Role.HOST_RANGE and (label := step_label(name)) is not None:
                self._steps[number] = label
            elif role == Role.HOST_RANGE and name.startswith(PROFILER_STEP):
                self._profiler_steps[number] = ""
        if number != _IGNORED or len(self._numbers) < 2 * _MAX_NAMES:
            self._numbers[identity] = number
        return number

    def _add_thread(self, event: Event) -> int:
        if len(self._threads) >= _MAX_THREADS:
            raise TraceError(f"{self._path}: more than {_MAX_THREADS} threads")
        return self._threads.setdefault((event.pid, event.tid), len(self._threads))

    def _learn_rank(self, event: Event) -> None:
        if event.name == "process_name" and event.args is not None:
            match = _RANK_NAME.fullmatch(bytes(event.args.name))
            if match:
                self._rank_of_process[event.pid] = int(match[1])
            if len(self._rank_of_process) > _MAX_RANKS:
                raise TraceError(f"{self._path}: more than {_MAX_RANKS} ranks")


def _role_of(category: str, name: str) -> Role | None:
    if category not in _ROLES or op_class_of(name) != OpClass.COMMUNICATION:
        return _ROLES.get(category)
    if category in _DEVICE_WORK:
        return Role.DEVICE_COMMUNICATION
    if name == FUNCTIONAL_WAIT:
        return Role.HOST_RANGE
    # Other events named after a collective only launch it; they are not work of the model.
    is_gloo = category == "user_annotation" and name.startswith("gloo:")
    return Role.HOST_COMMUNICATION if is_gloo else None
