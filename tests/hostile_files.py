"""Fuzzes the readers of every kind of file that a user can pass to Paceline.

A reader must either return or raise a `PacelineError` that names the problem. Any other exception,
a hang or a gigabyte of memory is a bug.
"""

import functools
import gzip
import io
import json
import pathlib
import random
import resource
import struct
import tempfile
import time
from collections.abc import Callable

import blake3
import pyarrow
import pyarrow.parquet
import safetensors.torch
import torch
import zstandard

from paceline.accounting.model_config import read_config_json
from paceline.checkpoint.catalog import list_checkpoints, verify_checkpoint
from paceline.checkpoint.restore import load_step
from paceline.checkpoint.state import load_training_state
from paceline.core import BatchShape, Estimate, ParallelLayout, Plan, model_preset, precision_preset
from paceline.core.errors import PacelineError
from paceline.core.units import KIB
from paceline.data.documents import ReadOptions, read_span
from paceline.data.inspect import document_lengths, verify
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.data.manifest import MANIFEST, read_manifest
from paceline.data.megatron import MegatronDataset
from paceline.data.prepare.tokenize import plan_pieces
from paceline.data.source_files import find_files
from paceline.data.storage import open_storage
from paceline.data.tokenizer import byte_tokenizer_json, load_tokenizer
from paceline.models.hugging_face import read_weights, shape_of_config, weight_files
from paceline.predict.calibration import calibrations
from paceline.records import RecordStore, encode_plan
from paceline.scaling import read_sweep
from paceline.traces.reader import Event, TraceReader
from paceline.training.config import DataConfig, RunConfig
from paceline.training.metrics import MetricsFile
from paceline.training.plan import read_plan
from paceline.training.toml_config import config_template, read_config
from tests.unit.checkpoint.runs import SmallRun, save_steps
from tests.unit.data.dataset_factory import random_documents, write_dataset

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


_SHARD = "train/00000000.tokens"


@functools.cache
def _dataset() -> dict[str, bytes]:
    """Returns the files of a small dataset by name."""
    with tempfile.TemporaryDirectory() as directory:
        write_dataset(directory, random_documents(200), shard_tokens=100)
        return _contents(pathlib.Path(directory))


_STEP = "step-00000001"


@functools.cache
def _checkpoint() -> dict[str, bytes]:
    """Returns the files of a checkpoint by name, its manifest without the digest."""
    with tempfile.TemporaryDirectory() as directory:
        save_steps(directory, [1], max_file_bytes=400)
        files = _contents(pathlib.Path(directory))
    sealed = json.loads(files[f"{_STEP}/{MANIFEST}"])
    return files | {f"{_STEP}/{MANIFEST}": json.dumps(sealed["manifest"]).encode()}


def _contents(directory: pathlib.Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def _complete(directory: pathlib.Path, files: dict[str, bytes]) -> None:
    """Writes the files that are missing around a damaged one."""
    for name, content in files.items():
        path = directory / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _read_dataset(directory: pathlib.Path) -> None:
    _complete(directory, _dataset())
    storage = open_storage(directory)
    manifest = read_manifest(storage)
    list(verify(storage, manifest))
    for split in manifest.splits:
        document_lengths(storage, manifest, split)
    config = LoaderConfig(
        sources=(SourceConfig(place=str(directory)),), context_length=20, batch_size=4
    )
    with TokenLoader(config) as loader:
        next(loader)


def _read_checkpoint(directory: pathlib.Path) -> None:
    _complete(directory, _checkpoint())
    manifest = directory / _STEP / MANIFEST
    body = manifest.read_bytes()
    digest = blake3.blake3(body).hexdigest().encode()
    manifest.write_bytes(b'{"blake3":"' + digest + b'","manifest":' + body + b"}\n")
    try:
        list_checkpoints(directory)
        list(verify_checkpoint(directory, 1))
        run = SmallRun()
        optimizers = {"main": run.optimizer}
        load_step(directory, 1, lambda source: load_training_state(source, run.model, optimizers))
    finally:
        manifest.write_bytes(body)


def _documents(path: pathlib.Path) -> int:
    options = ReadOptions(separator=b"\n\n", field="text", max_document_bytes=2**20)
    pieces = plan_pieces(find_files([str(path)]).files, options)
    spans = [span for piece in pieces for span in piece.spans]
    return sum(1 for span in spans for _ in read_span(span, options))


def _json_lines() -> bytes:
    return b"".join(json.dumps({"text": f"document {each}"}).encode() + b"\n" for each in range(9))


def _parquet() -> bytes:
    stream = io.BytesIO()
    texts = pyarrow.table({"text": ["one", None, "three"] * 3})
    pyarrow.parquet.write_table(texts, stream, row_group_size=4)
    return stream.getvalue()


def _megatron_index() -> bytes:
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", 2, 1, 3)
        + struct.pack("<3q", 0, 4, 6)
        + struct.pack("<4q", 0, 2, 3, 3)
    )


def _read_megatron(index: pathlib.Path) -> int:
    index.with_suffix(".bin").write_bytes(bytes(12))
    dataset = MegatronDataset(index)
    for number in range(min(len(dataset), 100)):
        dataset.document(number)
    return dataset.num_tokens()


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
        lambda: (
            b'{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, '
            b'"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256, '
            b'"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, '
            b'"tie_word_embeddings": false}'
        ),
        lambda path: shape_of_config(read_config_json(path.parent)),
    ),
    "Hugging Face index": (
        "model.safetensors.index.json",
        lambda: b'{"metadata": {}, "weight_map": {"a": "model.safetensors.index.json"}}',
        lambda path: weight_files(path.parent),
    ),
    "Hugging Face weights": (
        "model.safetensors",
        lambda: safetensors.torch.save({"a": torch.ones(3), "b": torch.zeros(2, 2)}),
        lambda path: read_weights(path.parent),
    ),
    "dataset manifest": (
        MANIFEST,
        lambda: _dataset()[MANIFEST],
        lambda path: _read_dataset(path.parent),
    ),
    "shard": (_SHARD, lambda: _dataset()[_SHARD], lambda path: _read_dataset(path.parents[1])),
    "checkpoint manifest": (
        f"{_STEP}/{MANIFEST}",
        lambda: _checkpoint()[f"{_STEP}/{MANIFEST}"],
        lambda path: _read_checkpoint(path.parents[1]),
    ),
    "Megatron index": ("data.idx", _megatron_index, _read_megatron),
    "Parquet": ("corpus.parquet", _parquet, _documents),
    "gzip": ("corpus.jsonl.gz", lambda: gzip.compress(_json_lines(), mtime=0), _documents),
    "zstd": ("corpus.jsonl.zst", lambda: zstandard.compress(_json_lines()), _documents),
    "JSON lines": ("corpus.jsonl", _json_lines, _documents),
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


def read_content(subject: str, content: bytes, directory: pathlib.Path) -> tuple[str, float]:
    """Reads a file with some content; returns the problem, empty if there is none, and seconds."""
    name, _, read = FILES[subject]
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    began = time.process_time()  # On a busy machine, the clock goes on while the reader waits.
    problem = ""
    try:
        read(path)
    except PacelineError as error:
        if "\n" in str(error):
            problem = f"a message of several lines: {error}"
    except Exception as error:  # A user would see a traceback.
        problem = f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    if seconds > LONGEST_S:
        problem = problem or f"took {seconds:.1f} s"
    return problem, seconds


def hostile_read(subject: str, seed: int, directory: pathlib.Path) -> tuple[str, float]:
    """Reads one randomly damaged file; returns the problem, empty if there is none, and seconds."""
    content = mutate(FILES[subject][1](), random.Random(f"{subject} {seed}"))
    problem, seconds = read_content(subject, content, directory)
    return problem and f"{subject}, seed {seed}: {problem}", seconds


def peak_bytes() -> int:
    """Returns the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
