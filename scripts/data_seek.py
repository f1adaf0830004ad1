"""Measures opening 10^13 tokens in 10^5 shards and reading sample 10^12, without torch.

The shards are sparse files, which have their full size but take no space. Every round is a separate
process, which opens the dataset, resumes at that sample and reads one batch. Appends one
`data_loader` record per context length to the store, with times and peak memory.

    python scripts/data_seek.py results/data-seek.jsonl
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

import msgspec

from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.data.manifest import MANIFEST, SCHEMA, Manifest, Split, encode_manifest, tokens_name
from paceline.data.storage import open_storage
from paceline.records import Metric, Record, RecordStore, capture_environment
from paceline.records.environment import processor_name

NUM_SHARDS = 10**5
SHARD_TOKENS = 10**8
FIRST_SAMPLE = 10**12
# Sample 10^12 is in the first epoch with a context of 8, and in the 410th with the usual 4096.
CONTEXTS = (8, 4096)
BATCH = 8


def write_sparse_dataset(place: pathlib.Path, shards: Iterable[int]) -> None:
    """Writes the manifest of all shards, and `shards` as sparse files."""
    digest = "0123456789abcdef" * 4
    entry = {
        "num_tokens": SHARD_TOKENS,
        "num_documents": 0,
        "tokens_blake3": digest,
        "documents_blake3": digest,
    }
    (place / "train").mkdir(parents=True)
    for shard in shards:
        with (place / tokens_name("train", shard)).open("wb") as file:
            os.truncate(file.fileno(), SHARD_TOKENS * 2)
    manifest = Manifest(
        schema=SCHEMA,
        dtype="uint16",
        shard_tokens=SHARD_TOKENS,
        vocab_size=50_000,
        end_of_document=0,
        tokenizer_blake3=digest,
        options={},
        sources=[],
        num_source_bytes=0,
        dropped={},
        splits={
            "train": Split(
                num_tokens=NUM_SHARDS * SHARD_TOKENS,
                num_documents=0,
                shards=msgspec.Raw(msgspec.json.encode([entry] * NUM_SHARDS)),
            )
        },
    )
    open_storage(place).write(MANIFEST, encode_manifest(manifest))


def seek(place: str, context: int, first_sample: int) -> dict[str, float]:
    """Opens a dataset and reads the batch at a sample; returns times and peak memory."""
    config = LoaderConfig(
        sources=(SourceConfig(place=place),), context_length=context, batch_size=BATCH, prefetch=0
    )
    began, began_cpu = time.perf_counter(), time.process_time()
    with TokenLoader(config) as loader:
        opened = time.perf_counter()
        loader.load_state_dict({**loader.state_dict(), "consumed_samples": first_sample})
        batch = next(loader)
        done, cpu_time = time.perf_counter(), time.process_time() - began_cpu
    assert batch.first_sample == first_sample
    assert "torch" not in sys.modules
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    return {
        "open_time_s": opened - began,
        "seek_time_s": done - opened,
        "total_time_s": done - began,
        "cpu_time_s": cpu_time,
        "resident_peak_bytes": peak_kib * 1024.0,
    }


def main() -> int:
    """Runs each round in a separate process, because peak memory is per process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seek", nargs=2, metavar=("PLACE", "CONTEXT"), help="one round")
    arguments = parser.parse_args()
    if arguments.seek:
        place, context = arguments.seek
        print(json.dumps(seek(place, int(context), FIRST_SAMPLE)))
        return 0
    store = RecordStore(arguments.store)
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory) / "dataset"
        write_sparse_dataset(place, range(NUM_SHARDS))
        for context in CONTEXTS:
            command = [sys.executable, __file__, str(arguments.store)]
            command += ["--seek", str(place), str(context)]
            # The first round reads the manifest from disk and is dropped.
            rounds = [
                json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                for _ in range(arguments.rounds + 1)
            ][1:]
            metrics = {
                name: Metric.from_samples([each[name] for each in rounds]) for name in rounds[0]
            }
            store.append(
                Record(
                    kind="data_loader",
                    case={
                        "subject": "open and seek",
                        "context": context,
                        "batch": BATCH,
                        "num_tokens": NUM_SHARDS * SHARD_TOKENS,
                        "num_shards": NUM_SHARDS,
                        "first_sample": FIRST_SAMPLE,
                        "rounds": arguments.rounds,
                        "device": "cpu",
                        "hardware": processor_name(),
                        "threads": 1,
                    },
                    environment=capture_environment(),
                    metrics=metrics,
                    outcome="ok",
                )
            )
            print(context, {name: metric.value for name, metric in metrics.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
