"""Fuzzes the readers of every kind of file that a user can pass to Paceline.

A reader must either return or raise a `PacelineError` that names the problem. Any other exception,
a hang or a gigabyte of memory is a bug.
"""

import functools
import json
import pathlib
import random
import resource
import time
from collections.abc import Callable

from paceline.checkpoint.catalog import list_checkpoints
from paceline.core import BatchShape, Estimate, ParallelLayout, Plan, model_preset, precision_preset
from paceline.core.errors import PacelineError
from paceline.core.units import KIB
from paceline.data.loader.config import SourceConfig
from paceline.data.manifest import read_manifest
from paceline.data.storage import open_storage
from paceline.data.tokenizer import byte_tokenizer_json, load_tokenizer
from paceline.models.hugging_face import read_config as hugging_face_config
from paceline.models.hugging_face import weight_files
from paceline.predict.calibration import calibrations
from paceline.records import RecordStore, encode_plan
from paceline.scaling import read_sweep
from paceline.traces.reader import Event, TraceReader
from paceline.training.config import DataConfig, RunConfig
from paceline.training.metrics import MetricsFile
from paceline.training.plan import read_plan
from paceline.training.toml_config import config_template, read_config

RESULTS = pathlib.Path(__file__).parents[1] / "results"
LONGEST_S = 10.0
MOST_BYTES = 500 * 10**6


def _lines(name: str, number: int, first: int = 0) -> bytes:
    """Returns `number` lines of a committed file of records, from line `first` on."""
    lines = (RESULTS / name).read_bytes().splitlines(keepends=True)
    return b"".join(lines[first : first + number])


@functools.cache
def _run_config() -> bytes:
    data = DataConfig(sources=(SourceConfig(place="tokens"),))
    return config_template(RunConfig(out="run", data=data)).encode()


def _trace() -> bytes:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": f"op {number}", "pid": 1, "tid": 1, "ts": number}
        | {"dur": 0.5, "args": {"External id": number}}
        for number in range(20)
    ]
    return json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()


def _sweep() -> bytes:
    sizes = range(1, 9)
    rows = [{"parameters": 10**n, "tokens": 10 ** (n + 2), "final_loss": 5 / n} for n in sizes]
    return json.dumps(rows).encode()


def _dataset() -> bytes:
    return json.dumps({"schema": 1, "blake3": "0" * 64, "vocab_size": 256, "splits": {}}).encode()


def _checkpoint() -> bytes:
    body = {"schema": 1, "step": 1, "save_id": "a", "world_size": 1, "block_bytes": 16}
    return json.dumps({"blake3": "0" * 64, "manifest": body}).encode()


def _searched_plan() -> bytes:
    plan = Plan(
        model=model_preset("bytes-6M"),
        batch=BatchShape(num_sequences=2, context_length=128, accumulation_steps=4),
        precision=precision_preset("bfloat16"),
        layout=ParallelLayout(shard=4, sharding="gradients"),
        hardware="h100-sxm",
        predictions={"step_time_s": Estimate(value=0.5)},
    )
    return encode_plan(plan)


Reader = Callable[[pathlib.Path], object]
FILES: dict[str, tuple[str, Callable[[], bytes], Reader]] = {
    "run config": ("run.toml", _run_config, read_config),
    "plan": ("plan.json", lambda: _lines("step-backtest.jsonl", 2, first=12), read_plan),
    "searched plan": ("plan.json", _searched_plan, read_plan),
    "records": (
        "records.jsonl",
        lambda: _lines("ddp-2gbit.jsonl", 2),
        lambda path: list(RecordStore(path).read()),
    ),
    "calibration": (
        "calibration.jsonl",
        lambda: _lines("calibration-repeats.jsonl", 21),
        lambda path: list(calibrations(RecordStore(path).read())),
    ),
    "metrics": (
        "metrics.jsonl",
        lambda: _lines("training-run/metrics.jsonl", 8),
        lambda path: list(MetricsFile(path).read()),
    ),
    "trace": (
        "trace.json",
        _trace,
        lambda path: [event for events in TraceReader(path, Event) for event in events],
    ),
    "scaling runs": ("runs.json", _sweep, read_sweep),
    "tokenizer": ("tokenizer.json", lambda: byte_tokenizer_json().encode(), load_tokenizer),
    "Hugging Face config": (
        "config.json",
        lambda: b'{"model_type": "llama", "hidden_size": 64, "vocab_size": 256}',
        lambda path: hugging_face_config(path.parent),
    ),
    "Hugging Face index": (
        "model.safetensors.index.json",
        lambda: b'{"metadata": {}, "weight_map": {"a": "model.safetensors.index.json"}}',
        lambda path: weight_files(path.parent),
    ),
    "dataset manifest": (
        "manifest.json",
        _dataset,
        lambda path: read_manifest(open_storage(path.parent)),
    ),
    "checkpoint manifest": (
        "step-00000001/manifest.json",
        _checkpoint,
        lambda path: list_checkpoints(path.parents[1]),
    ),
}

_TOKENS = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"-Infinity", b"99999999999999999999"),
    *(b'""', b"[]", b"{}", b"\x00", b"\xff\xfe", b"\\u0000", b'"', b"}", b"]", b","),
    *(b"../../etc/passwd", b"[" * 5000, b'{"a":' * 5000, b"9" * 5000),
)


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Returns the content with one to three random mutations."""
    damaged = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(damaged) + 1)
        length = min(chance.choice((1, 4, 40)), len(damaged) - place)
        match chance.randrange(6):
            case 0 if length:
                damaged[place] ^= 1 << chance.randrange(8)
            case 1:
                del damaged[place:]
            case 2:
                del damaged[place : place + length]
            case 3:
                damaged[place:place] = damaged[place : place + length] * chance.choice((1, 50))
            case 4:
                damaged[place : place + length] = chance.choice(_TOKENS)
            case _:
                damaged[place:place] = chance.choice(_TOKENS)
    return bytes(damaged)


def hostile_read(subject: str, seed: int, directory: pathlib.Path) -> tuple[str, float]:
    """Reads one damaged file; returns the problem, empty if there is none, and the seconds."""
    name, make, read = FILES[subject]
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(mutate(make(), random.Random(f"{subject} {seed}")))
    began = time.perf_counter()
    problem = ""
    try:
        read(path)
    except PacelineError as error:
        if "\n" in str(error):
            problem = f"a message of several lines: {error}"
    except Exception as error:  # A user would see a traceback.
        problem = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    if seconds > LONGEST_S:
        problem = problem or f"took {seconds:.1f} s"
    return problem and f"{subject}, seed {seed}: {problem}", seconds


def peak_bytes() -> int:
    """Returns the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
