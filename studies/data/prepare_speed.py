"""Measures how fast documents become shards, against a bare loop of the tokenizers package.

The bare loop only tokenizes text that is already in memory, on one thread. Prepare reads, hashes,
tokenizes, looks for duplicates and writes shards with digests. All variants take turns in every
round, so that other load on the machine affects all of them. Appends one `comparison` record per
variant of prepare to the store:

    python -m studies.data.prepare_speed results/data-prepare.jsonl corpus/ \
        --tokenizer tokenizer.json --rounds 5 --ray
"""

import dataclasses
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

from paceline.core.units import MB, MIB
from paceline.data.documents import Document, read_span
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.job import reading_options
from paceline.data.prepare.run import prepare
from paceline.data.prepare.tokenize import plan_pieces
from paceline.data.source_files import find_files
from paceline.data.tokenizer import load_tokenizer, one_thread
from studies.harness.records import append_record, machine_case
from studies.harness.study import study_parser
from studies.harness.turns import interleaved, timed

_BARE = "bare tokenizers loop"
_ONE = "prepare, 1 worker"
_TWO = "prepare, 2 workers"
_RAY = "prepare, ray, 2 workers"


def main() -> None:
    """Measures, prints and records the speeds."""
    parser = study_parser(__doc__)
    parser.add_argument("source", nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="also on a Ray cluster of this machine")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = PrepareConfig(
            sources=tuple(arguments.source),
            tokenizer=arguments.tokenizer,
            out=f"{folder}/out",
            workers=1,
        )
        batches, num_bytes = _batches(config)
        print(f"{num_bytes / MB:.1f} MB in {sum(map(len, batches)):,} documents")
        start_s = 0.0
        ways: dict[str, Callable[[], float]] = {
            _BARE: lambda: _bare(config, batches),
            _ONE: lambda: _prepared(config),
            _TWO: lambda: _prepared(dataclasses.replace(config, workers=2)),
        }
        if arguments.ray:
            start_s = _start_ray()
            spread = dataclasses.replace(config, engine="ray", workers=2)
            ways[_RAY] = lambda: _prepared(spread)
        seconds = interleaved(ways, arguments.rounds)
    for name, baseline in ((_ONE, _BARE), (_TWO, _ONE), (_RAY, _TWO)):
        if name in seconds:
            ours, base = seconds[name], seconds[baseline]
            case = {
                "subject": name,
                "baseline": baseline,
                **machine_case(),
                "threads": 1,
                "size_bytes": num_bytes,
                "rounds": arguments.rounds,
            }
            numbers = {
                "time_ratio": [own / other for own, other in zip(ours, base, strict=True)],
                "mb_per_s": [num_bytes / MB / each for each in ours],
                "baseline_mb_per_s": [num_bytes / MB / each for each in base],
                **({"start_s": start_s} if name == _RAY else {}),
            }
            append_record(arguments.store, "comparison", case, numbers)
    for name, samples in seconds.items():
        print(f"{name}: {num_bytes / MB / statistics.median(samples):.2f} MB/s")


def _batches(config: PrepareConfig) -> tuple[list[list[str]], int]:
    """Returns all texts in batches of about a MiB, and their total bytes."""
    reading = reading_options(config)
    batches: list[list[str]] = [[]]
    size = num_bytes = 0
    for piece in plan_pieces(find_files(config.sources).files, reading):
        for span in piece.spans:
            for found in read_span(span, reading):
                if isinstance(found, Document):
                    batches[-1].append(found.text)
                    size += len(found.text)
                    num_bytes += len(found.text.encode())
                if size >= MIB:
                    batches.append([])
                    size = 0
    return batches, num_bytes


def _bare(config: PrepareConfig, batches: list[list[str]]) -> float:
    inner = load_tokenizer(config.tokenizer)._inner
    with one_thread():
        began = time.perf_counter()
        for batch in batches:
            for encoding in inner.encode_batch_fast(batch, add_special_tokens=False):
                _ = encoding.ids
        return time.perf_counter() - began


def _prepared(config: PrepareConfig) -> float:
    shutil.rmtree(config.out, ignore_errors=True)
    return timed(lambda: prepare(config))()


def _start_ray() -> float:
    """Starts a Ray cluster for all rounds; returns the seconds that this took."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    start = functools.partial(ray.init, num_cpus=2, include_dashboard=False, log_to_driver=False)
    return timed(start)()


if __name__ == "__main__":
    main()
