"""Measures the loader's speed against a bare memory-map loop, torchdata and training.

In every round, these readers take turns on the same samples of the same shards, in the same order:
- bare: a loop that copies slices of np.memmap to int64 arrays, from a list of samples
- loader: in the calling thread, without digests
- digests: with a digest of each batch for the audit trail
- prefetch: with digests and a prefetch thread; time until the batches are delivered
torchdata's StatefulDataLoader takes part with its own shuffling sampler. Also measured: the size of
both loaders' states, the time from a state at nine tenths of an epoch to the next batch, and the
tokens per second of training the fastest preset. Appends `data_loader` records to the store.

    python -m studies.data.loader_speed results/data-loader.jsonl
"""

import collections
import functools
import itertools
import json
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.data.manifest import read_manifest, tokens_name
from paceline.data.storage import open_storage
from paceline.records import Metric
from studies.data.datasets import write_manifest
from studies.harness.records import append_record, machine_case
from studies.harness.study import PACELINE, study_parser
from studies.harness.turns import interleaved, timed

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
    write_manifest(place, num_shards, shard_tokens)


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
    num_rounds = rounds + 1  # The first one warms up.
    places = np.arange(BATCH, (1 + num_rounds * num_batches) * BATCH)
    _, samples = loaders["loader"].reader.locate(places)
    readers = {"bare": bare.batches(samples), **loaders, "torchdata": torchdata}
    last: dict[str, list[Any]] = {name: [] for name in readers}

    def read(name: str) -> float:
        began = time.perf_counter()
        taken = collections.deque(itertools.islice(readers[name], num_batches), maxlen=1)
        seconds = time.perf_counter() - began
        last[name].append(taken.pop())
        return seconds / num_batches

    # The first reader of a round loads the pages into memory, so the order has to rotate.
    seconds = interleaved({name: functools.partial(read, name) for name in readers}, rounds)
    for name in loaders:
        for own, expected in zip(last[name], last["bare"], strict=True):
            assert np.array_equal(own.rows, expected)
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

    ways = {"own": timed(resume_own), "torchdata": timed(resume_theirs)}
    times = interleaved(ways, rounds, warmup=0)
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
    command = [*PACELINE, "bench", "step", "--model", MODEL]
    command += ["--context", "256", "--batch", "8", "--json", "--store", str(store)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    record = json.loads(result.stdout.splitlines()[-1])
    return 8 * 256 / record["metrics"]["step_time_s"]["value"]


def main() -> int:
    """Measures everything on a temporary dataset."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batches", type=int, default=2000, help="of a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def record(subject: str, context: int, metrics: dict[str, Metric], **method: Any) -> None:
        case = {
            "subject": subject,
            "context": context,
            "batch": BATCH,
            "num_tokens": NUM_SHARDS * SHARD_TOKENS,
            "num_shards": NUM_SHARDS,
            **machine_case(),
            "rounds": arguments.rounds,
            **method,
        }
        append_record(arguments.store, "data_loader", case, metrics)
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
