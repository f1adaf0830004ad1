"""Measures the loader's speed against a bare memory-map loop, torchdata and training.

In every round, these readers take turns on the same samples of the same shards, in the same order:
- bare: a loop that copies slices of np.memmap to int64 arrays, from a list of samples
- loader: in the calling thread, without digests
- digests: with a digest of each batch for the audit trail
- prefetch: with digests and a prefetch thread; time until the batches are delivered
torchdata's StatefulDataLoader takes part with its own shuffling sampler. Also measured: the size of
both loaders' states, the time from a state at nine tenths of an epoch to the next batch, and the
tokens per second of training the fastest preset. Appends `data_loader` records to the store.

    python scripts/data_loader_speed.py results/data-loader.jsonl
"""

import argparse
import collections
import itertools
import json
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.data.manifest import (
    MANIFEST,
    SCHEMA,
    Manifest,
    Split,
    encode_manifest,
    read_manifest,
    tokens_name,
)
from paceline.data.storage import open_storage
from paceline.records import Metric, Record, RecordStore, capture_environment
from paceline.records.environment import processor_name

SHARD_TOKENS = 2**26
NUM_SHARDS = 4
BATCH = 8
CONTEXT = 1024
SHORT_CONTEXT = 64
"""An epoch has 16 times as many samples of this length."""
MODEL = "bytes-6M"


def write_dataset(place: pathlib.Path, num_shards: int, shard_tokens: int) -> None:
    """Writes shards of random tokens and a manifest."""
    generator = np.random.default_rng(0)
    (place / "train").mkdir(parents=True)
    for shard in range(num_shards):
        tokens = generator.integers(0, 50_000, shard_tokens, dtype=np.uint16)
        tokens.tofile(place / tokens_name("train", shard))
    manifest = Manifest(
        schema=SCHEMA,
        dtype="uint16",
        shard_tokens=shard_tokens,
        vocab_size=50_000,
        end_of_document=0,
        tokenizer_blake3="",
        options={},
        sources=[],
        num_source_bytes=0,
        dropped={},
        splits={
            "train": Split(
                num_tokens=num_shards * shard_tokens, num_documents=0, shards=msgspec.Raw(b"[]")
            )
        },
    )
    open_storage(place).write(MANIFEST, encode_manifest(manifest))


def make_config(place: pathlib.Path, context: int, **options: Any) -> LoaderConfig:
    """Returns the loader config that all readers share, with `options` added."""
    source = SourceConfig(place=str(place))
    return LoaderConfig(sources=(source,), context_length=context, batch_size=BATCH, **options)


class BareSamples(Dataset[torch.Tensor]):
    """Samples by index: slices of np.memmap, as in any simple trainer."""

    def __init__(self, place: pathlib.Path, context: int) -> None:
        manifest = read_manifest(open_storage(place))
        paths = [
            place / tokens_name("train", shard) for shard in range(manifest.num_shards("train"))
        ]
        self._maps = [np.memmap(path, dtype=np.uint16, mode="r") for path in paths]
        self._shard_tokens = manifest.shard_tokens
        self._context = context
        self._num_samples = (manifest.splits["train"].num_tokens - 1) // context

    def __len__(self) -> int:
        return self._num_samples

    def read(self, sample: int, row: np.ndarray) -> None:
        """Copies a sample to a row."""
        shard, offset = divmod(sample * self._context, self._shard_tokens)
        tokens = self._maps[shard][offset : offset + len(row)]
        row[: len(tokens)] = tokens
        if len(tokens) < len(row):
            row[len(tokens) :] = self._maps[shard + 1][: len(row) - len(tokens)]

    def __getitem__(self, sample: int) -> torch.Tensor:
        row = np.empty(self._context + 1, dtype=np.int64)
        self.read(sample, row)
        return torch.from_numpy(row)

    def batches(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the batches of a list of samples."""
        for numbers in samples.reshape(-1, BATCH).tolist():
            rows = np.empty((BATCH, self._context + 1), dtype=np.int64)
            for number, sample in enumerate(numbers):
                self.read(sample, rows[number])
            yield rows


def time_ways(place: pathlib.Path, rounds: int, num_batches: int) -> dict[str, list[float]]:
    """Returns the seconds per batch of each reader in each round."""
    bare = BareSamples(place, CONTEXT)
    loaders = {
        "loader": TokenLoader(make_config(place, CONTEXT, digests=False, prefetch=0)),
        "digests": TokenLoader(make_config(place, CONTEXT, prefetch=0)),
        "prefetch": TokenLoader(make_config(place, CONTEXT)),
    }
    torchdata = iter(StatefulDataLoader(bare, batch_size=BATCH, shuffle=True))
    next(torchdata)
    for loader in loaders.values():
        next(loader)
    locate = loaders["loader"].reader.locate
    last: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", *loaders, "torchdata")}
    for number in range(rounds + 1):
        first = (1 + number * num_batches) * BATCH
        _, samples = locate(np.arange(first, first + num_batches * BATCH))
        ways: dict[str, Callable[[], Iterator[Any]]] = {
            "bare": lambda samples=samples: bare.batches(samples),
            **{name: lambda loader=loader: loader for name, loader in loaders.items()},
            "torchdata": lambda: torchdata,
        }
        # The first reader of a round loads the pages into memory, so the order rotates.
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            taken_batches = collections.deque(itertools.islice(ways[name](), num_batches), maxlen=1)
            taken = time.perf_counter() - began
            if number:
                seconds[name].append(taken / num_batches)
            last[name] = taken_batches.pop()
        assert all(np.array_equal(last[name].rows, last["bare"]) for name in loaders)
    for loader in loaders.values():
        loader.close()
    return seconds


def resume_numbers(place: pathlib.Path, context: int, rounds: int) -> dict[str, dict[str, Metric]]:
    """Returns the state size and resume time of both loaders."""
    samples = BareSamples(place, context)
    position = len(samples) // BATCH * 9 // 10
    with TokenLoader(make_config(place, context)) as loader:
        own_state = {**loader.state_dict(), "consumed_samples": position * BATCH, "step": position}
    theirs = StatefulDataLoader(samples, batch_size=BATCH, shuffle=True)
    for _ in itertools.islice(theirs, position):
        pass
    their_state = theirs.state_dict()

    def resume_own() -> None:
        with TokenLoader(make_config(place, context)) as loader:
            loader.load_state_dict(own_state)
            next(loader)

    def resume_theirs() -> None:
        loader = StatefulDataLoader(samples, batch_size=BATCH, shuffle=True)
        loader.load_state_dict(their_state)
        next(iter(loader))

    times: dict[str, list[float]] = {"own": [], "torchdata": []}
    for _ in range(rounds):
        for name, resume in (("own", resume_own), ("torchdata", resume_theirs)):
            began = time.perf_counter()
            resume()
            times[name].append(time.perf_counter() - began)
    states = {"own": own_state, "torchdata": their_state}
    return {
        name: {
            "resume_time_s": Metric.from_samples(times[name]),
            "state_bytes": Metric(value=len(pickle.dumps(states[name]))),
        }
        for name in times
    }


def training_tokens_per_s(store: pathlib.Path) -> float:
    """Returns the tokens per second of training the fastest preset."""
    command = [sys.executable, "-m", "paceline", "bench", "step", "--model", MODEL]
    command += ["--context", "256", "--batch", "8", "--json", "--store", str(store)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    record = json.loads(result.stdout.splitlines()[-1])
    return 8 * 256 / record["metrics"]["step_time_s"]["value"]


def main() -> int:
    """Measures everything on a temporary dataset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batches", type=int, default=2000, help="of a round")
    arguments = parser.parse_args()
    store = RecordStore(arguments.store)
    torch.set_num_threads(1)

    def record(subject: str, context: int, metrics: dict[str, Metric], **method: Any) -> None:
        case = {
            "subject": subject,
            "context": context,
            "batch": BATCH,
            "num_tokens": NUM_SHARDS * SHARD_TOKENS,
            "num_shards": NUM_SHARDS,
            "device": "cpu",
            "hardware": processor_name(),
            "threads": 1,
            "rounds": arguments.rounds,
            **method,
        }
        store.append(
            Record(
                kind="data_loader",
                case=case,
                environment=capture_environment(),
                metrics=metrics,
                outcome="ok",
            )
        )
        print(subject, context, {name: f"{metric.value:.4g}" for name, metric in metrics.items()})

    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory) / "dataset"
        write_dataset(place, NUM_SHARDS, SHARD_TOKENS)
        seconds = time_ways(place, arguments.rounds, arguments.batches)
        training = training_tokens_per_s(pathlib.Path(directory) / "steps.jsonl")
        for name, samples in seconds.items():
            ratios = [own / bare for own, bare in zip(samples, seconds["bare"], strict=True)]
            rates = [BATCH * CONTEXT / each for each in samples]
            metrics = {
                "batch_time_s": Metric.from_samples(samples),
                "time_ratio": Metric.from_samples(ratios),
                "tokens_per_s": Metric.from_samples(rates),
                "times_training_ratio": Metric.from_samples([each / training for each in rates]),
            }
            record(f"read: {name}", CONTEXT, metrics, baseline="bare")
        record(f"train: {MODEL}", 256, {"tokens_per_s": Metric(value=training)})
        for context in (CONTEXT, SHORT_CONTEXT):
            for name, metrics in resume_numbers(place, context, arguments.rounds).items():
                record(f"resume: {name}", context, metrics, baseline="torchdata")
    return 0


if __name__ == "__main__":
    sys.exit(main())
