"""Measures opening 10^13 tokens in 10^5 shards and reading sample 10^12, without torch.

The shards are sparse files, which have their full size but take no space. Every round is a separate
process, which opens the dataset, resumes at that sample and reads one batch. Appends one
`data_loader` record per context length to the store, with times and peak memory.

    python -m studies.data.seek results/data-seek.jsonl
"""

import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable

from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.data.manifest import tokens_name
from studies.data.datasets import write_manifest
from studies.harness.records import append_record, machine_case
from studies.harness.study import in_fresh_process, resident_peak_bytes, study_parser

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
    write_manifest(
        place, NUM_SHARDS, SHARD_TOKENS, shards=[entry] * NUM_SHARDS, tokenizer_blake3=digest
    )


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
    return {
        "open_time_s": opened - began,
        "seek_time_s": done - opened,
        "total_time_s": done - began,
        "cpu_time_s": cpu_time,
        "resident_peak_bytes": resident_peak_bytes(),
    }


def main() -> int:
    """Runs each round in a separate process, because peak memory is per process."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory) / "dataset"
        write_sparse_dataset(place, range(NUM_SHARDS))
        for context in CONTEXTS:
            # The first round reads the manifest from disk and is dropped.
            rounds = [
                in_fresh_process(seek, str(place), context, FIRST_SAMPLE)
                for _ in range(arguments.rounds + 1)
            ][1:]
            numbers = {name: [each[name] for each in rounds] for name in rounds[0]}
            case = {
                "subject": "open and seek",
                "context": context,
                "batch": BATCH,
                "num_tokens": NUM_SHARDS * SHARD_TOKENS,
                "num_shards": NUM_SHARDS,
                "first_sample": FIRST_SAMPLE,
                "rounds": arguments.rounds,
                **machine_case(),
                "threads": 1,
            }
            append_record(arguments.store, "data_loader", case, numbers)
            print(context, {name: statistics.median(each) for name, each in numbers.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
