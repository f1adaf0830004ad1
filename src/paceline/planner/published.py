"""Published training runs: model, device, layout and measured speed, read strictly.

Fields that a source does not state are None; no values are inferred here. If a source contradicts
itself, the row keeps the published values and `marks` lists the contradictions
(`studies/planner/published_checks.py`).

The data set has three files. `sources.json` holds each source and the fields that its rows share.
`models.json` holds the dimensions of each model. `runs.csv` holds the remaining fields, one line
per measurement. User rows are JSON Lines with the same fields, or with a `log`
(`paceline.planner.logs`) instead of a measured value. Their model is a name in `models.json`, a
preset, or given as `shape`. An unknown field, a value of the wrong type or an impossible number
raises an error that names the file and the line. The data set contains figures, which are facts,
with their sources. It copies no text from them.
"""

import csv
import functools
import math
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from paceline.core.errors import UsageError, did_you_mean
from paceline.core.files import read_named
from paceline.core.plan import CHECKPOINTINGS
from paceline.core.presets import model_preset, preset_names
from paceline.core.specs import Experts, ModelShape
from paceline.planner.logs import read_log

Unit = Literal[
    "s/iteration",
    "tokens/s/device",
    "model TFLOP/s/device",
    "hardware TFLOP/s/device (recomputation counted)",
    "TFLOP/s/chip",
    "MFU %",
    "OOM",
]
"""OOM: the run ran out of memory and has no measured value."""
Evidence = Literal["text", "image", "secondary", "already in the project"]
"""text: stated in the source; image: read off a figure; secondary: transcribed by a third party."""

_PRECISIONS = ("bfloat16", "bf16", "float16", "fp16", "float8", "fp8", "mxfp8", "float4", "nvfp4")
"""Names of dtypes of matmuls that a user's row may have, beside the words of published rows."""
_FEED_FORWARD = {"squared_relu": "gelu"}
"""Activation functions with the same matrices and memory traffic as another."""
_POSITIONS = {"alibi": "none"}


class PublishedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of a published model, with their source."""

    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    vocab_size: int
    feed_forward: Literal["gelu", "swiglu", "squared_relu"]
    norm: Literal["layernorm", "rmsnorm"]
    positions: Literal["learned", "rotary", "alibi"]
    biases: bool
    tied_embeddings: bool
    source: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    attention_weights: int | None = None
    experts: Experts | None = None
    """The experts that replace feed-forward layers; None for a dense model."""

    def shape(self, context_length: int) -> ModelShape:
        """Returns the model's shape. With experts, `d_ff` is the active width."""
        fields = msgspec.structs.asdict(self)
        del fields["source"], fields["experts"]
        if self.experts is not None:
            fields["d_ff"] = self.experts.active_width(self.num_layers)
        fields["feed_forward"] = _FEED_FORWARD.get(self.feed_forward, self.feed_forward)
        fields["positions"] = _POSITIONS.get(self.positions, self.positions)
        return ModelShape(**fields, max_context_length=context_length)


class PublishedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the data set."""

    id: str
    source: str
    """Key of the source, see `sources`; for user rows, any text."""
    framework: str
    model: str
    device: str
    precision: str
    unit: Unit
    measured: float | None = None
    place: str = ""
    """Line, table or figure in the source."""
    devices: int | None = None
    context_length: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    context: int = 1
    expert: int = 1
    data: int | None = None
    """Number of data-parallel ranks: replicas times shards."""
    zero: Literal[0, 1, 2, 3] | None = None
    shard: int | None = None
    replicate: int | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    overlap: str | None = None
    network: str | None = None
    network_bytes_per_s: float | None = None
    """Stated bandwidth of one device in one direction between hosts."""
    evidence: Evidence = "text"
    note: str | None = None
    also: dict[str, float] = {}
    """Additional figures of the same run, such as model_tflops, mfu_pct, memory_gb."""
    marks: tuple[str, ...] = ()
    """Contradictions in this row."""
    shape: PublishedModel | None = None
    """The model's dimensions, if the model is neither in `models.json` nor a preset."""

    def __post_init__(self) -> None:
        axes = ("devices", "context_length", "global_batch", "micro_batch", "data", "shard")
        for field in (*axes, "replicate", "tensor", "pipeline", "interleave", "context", "expert"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UsageError(f"run {self.id}: {field} is {value}; it must be at least 1")
        if (self.measured is None) != (self.unit == "OOM"):
            raise UsageError(f"run {self.id}: give a measured value, or the unit OOM, not both")
        if self.measured is not None and not 0 < self.measured < math.inf:
            raise UsageError(f"run {self.id}: measured is {self.measured}; it must be positive")
        network = self.network_bytes_per_s
        if network is not None and not 0 < network < math.inf:
            raise UsageError(
                f"run {self.id}: network_bytes_per_s is {network}; it must be positive"
            )

    @property
    def axes_product(self) -> int | None:
        """Product of the layout's axes; None if data parallelism is not stated."""
        if self.data is None:
            return None
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens in the global batch; None if it is not stated."""
        if self.global_batch is None or self.context_length is None:
            return None
        return self.global_batch * self.context_length

    @property
    def step_s(self) -> float | None:
        """Seconds per step, stated or derived from tokens per second and device; else None."""
        if self.unit == "s/iteration":
            return self.measured
        if self.unit != "tokens/s/device" or self.measured is None:
            return None
        if self.tokens_per_step is None or self.devices is None:
            return None
        return self.tokens_per_step / (self.measured * self.devices)


_DATA = pathlib.Path(__file__).parent / "data"


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A publication that rows come from."""

    where: str
    """Repository, commit and file, or the paper."""
    common: dict[str, Any] = {}
    """Fields with the same value in all rows of the source."""


@functools.cache
def published_models() -> dict[str, PublishedModel]:
    """Returns the dimensions of the published models, by name."""
    return msgspec.json.decode((_DATA / "models.json").read_bytes(), type=dict[str, PublishedModel])


@functools.cache
def sources() -> dict[str, Source]:
    """Returns the sources of the published runs, by key."""
    return msgspec.json.decode((_DATA / "sources.json").read_bytes(), type=dict[str, Source])


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Returns every published run, in file order."""
    path = _DATA / "runs.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(
            _convert(_fields(row), f"{path.name}, line {number}", strict=False)
            for number, row in enumerate(csv.DictReader(file), start=2)
        )


def read_rows(path: pathlib.Path | str) -> list[PublishedRun]:
    """Reads user-provided rows: JSON Lines with the fields of `PublishedRun`."""
    return list(_read_lines(pathlib.Path(path)))


def model_of(run: PublishedRun) -> PublishedModel | ModelShape | None:
    """Returns the dimensions of a run's model; None if they are unknown."""
    if run.shape is not None:
        return run.shape
    if run.model in published_models():
        return published_models()[run.model]
    return model_preset(run.model) if run.model in preset_names() else None


def _read_lines(path: pathlib.Path) -> Iterator[PublishedRun]:
    content = read_named(path, "give JSON Lines, one measured run per line")
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise UsageError(f"{where}: not a JSON object; one measured run per line")
        if "log" in fields:
            fields = _with_log(fields, path.parent, where)
        fields = {"id": f"line {number}", "source": path.name, **fields}
        run = _convert(fields, where, strict=True)
        _require_known_words(run, where)
        if model_of(run) is None:
            raise UsageError(
                f"{where}: unknown model {run.model!r}; name a preset, or give its shape"
            )
        yield run


def _require_known_words(run: PublishedRun, where: str) -> None:
    """Raises for a recomputation or a dtype that is unknown: it would count as the usual one."""
    for field, known in (("recompute", CHECKPOINTINGS), ("precision", _PRECISIONS)):
        word = getattr(run, field)
        if word in (None, *known) or word in {getattr(each, field) for each in published_runs()}:
            continue
        raise UsageError(
            f"{where}: {field} is {word!r}; {did_you_mean(word, known)}known: {', '.join(known)}"
        )


def _with_log(fields: dict[str, Any], directory: pathlib.Path, where: str) -> dict[str, Any]:
    """Replaces the name of a log by what the log says; the row's own fields win."""
    if "measured" in fields or "unit" in fields:
        raise UsageError(f"{where}: give a log, or measured and unit, not both")
    logged = read_log(directory / str(fields["log"]))
    own = {name: value for name, value in fields.items() if name != "log"}
    return {**logged.fields, "unit": logged.unit, "measured": logged.measured, **own}


def _fields(row: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of a CSV row, merged with the common fields of its source."""
    fields: dict[str, Any] = {name: cell for name, cell in row.items() if cell != ""}
    if "also" in fields:
        fields["also"] = dict(pair.split("=") for pair in fields["also"].split(";"))
    if "marks" in fields:
        fields["marks"] = fields["marks"].split(";")
    return {**sources()[row["source"]].common, **fields}


def _convert(fields: dict[str, Any], where: str, *, strict: bool) -> PublishedRun:
    """Converts the fields of a row; cells of a CSV file are text, which `strict` does not take."""
    try:
        return msgspec.convert(fields, PublishedRun, strict=strict)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from error
