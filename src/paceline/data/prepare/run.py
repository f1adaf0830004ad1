"""Prepares a dataset: plan, tokenize, drop duplicates, write shards, and finally the manifest.

A preparation that was killed at any point resumes when it is started again. A complete dataset is
left unchanged, and a different dataset at the same location is an error.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from paceline.core.errors import DataError
from paceline.core.units import Progress
from paceline.data.manifest import (
    MANIFEST,
    SCHEMA,
    SPLITS,
    TOKENIZER,
    DatasetManifest,
    Dropped,
    ShardEntry,
    Split,
    SplitName,
    documents_name,
    encode_manifest,
    tokens_name,
)
from paceline.data.prepare.blocks import MOST_EXAMPLES, PieceResult, merge_dropped
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.duplicates import (
    GroupResult,
    GroupTask,
    PartitionTask,
    find_duplicates,
    gather_duplicates,
    num_groups,
    num_partitions,
    write_table,
)
from paceline.data.prepare.engines import Engine, Result, TaskT, open_engine
from paceline.data.prepare.job import WORK, Job, find_finished, find_inputs, make_job
from paceline.data.prepare.shards import ShardTask, plan_shards, write_shard
from paceline.data.prepare.tokenize import PieceTask, plan_pieces, tokenize_piece
from paceline.data.sources.documents import UNKNOWN_KIND
from paceline.data.sources.files import FoundFiles
from paceline.data.storage import Storage, open_storage


def prepare(config: PrepareConfig, progress: Progress | None = None) -> DatasetManifest:
    """Prepares a dataset, unless it is already prepared, and returns its manifest."""
    inputs = find_inputs(config)
    storage = open_storage(config.out)
    finished = find_finished(inputs, storage)
    if finished is not None:
        storage.clear(WORK)
        return finished
    storage.write(TOKENIZER, inputs.tokenizer.json.encode())
    job = make_job(config, inputs)
    tasks = [PieceTask(job=job, piece=piece) for piece in plan_pieces(inputs.files, job.reading)]
    with open_engine(config) as engine:
        pieces = _tokenize(engine, tasks, progress or _no_progress)
        dropped = [_unknown_files(inputs.found), *(piece.dropped for piece in pieces)]
        if not any(piece.blocks for piece in pieces):
            raise _nothing_left(config, merge_dropped(dropped))
        plan_id = write_table(job, tasks, pieces)
        groups = _drop_duplicates(engine, job, plan_id, pieces)
        dropped += [group.dropped for group in groups]
        kept = _kept(pieces, groups)
        shard_tasks = plan_shards(job, plan_id, kept.tokens)
        entries = _run_all(engine, write_shard, shard_tasks)
    for file in inputs.files:
        file.require_unchanged()
    manifest = DatasetManifest(
        schema=SCHEMA,
        dtype="uint16" if inputs.tokenizer.dtype.itemsize == 2 else "uint32",
        shard_tokens=config.shard_tokens,
        vocab_size=inputs.tokenizer.vocab_size,
        end_of_document=inputs.tokenizer.end_of_document,
        tokenizer_blake3=inputs.tokenizer.blake3,
        options=inputs.options,
        sources=inputs.sources,
        num_source_bytes=kept.num_bytes,
        dropped=merge_dropped(dropped),
        splits=_splits(shard_tasks, entries, kept.num_documents),
    )
    _remove_others(storage, manifest)
    storage.write(MANIFEST, encode_manifest(manifest))
    storage.clear(WORK)
    return manifest


class _Kept(NamedTuple):
    tokens: dict[SplitName, list[int]]
    """Number of kept tokens, by block."""
    num_documents: dict[SplitName, int]
    num_bytes: int


def _tokenize(engine: Engine, tasks: Sequence[PieceTask], progress: Progress) -> list[PieceResult]:
    total = sum(task.piece.num_bytes for task in tasks)
    done = 0
    results: dict[int, PieceResult] = {}
    progress(0, total)
    for number, result in engine.run(tokenize_piece, tasks):
        results[number] = result
        done += tasks[number].piece.num_bytes
        progress(done, total)
    return [results[number] for number in range(len(tasks))]


def _drop_duplicates(
    engine: Engine, job: Job, plan_id: str, pieces: Sequence[PieceResult]
) -> list[GroupResult]:
    blocks = [block for piece in pieces for block in piece.blocks]
    partitions = num_partitions(sum(sum(block.num_documents.values()) for block in blocks))
    _run_all(
        engine,
        find_duplicates,
        [
            PartitionTask(job=job, plan_id=plan_id, partition=each, num_partitions=partitions)
            for each in range(partitions)
        ],
    )
    return _run_all(
        engine,
        gather_duplicates,
        [
            GroupTask(job=job, plan_id=plan_id, group=each, num_partitions=partitions)
            for each in range(num_groups(len(blocks)))
        ],
    )


def _kept(pieces: Sequence[PieceResult], groups: Sequence[GroupResult]) -> _Kept:
    """Returns the counts of every block without the duplicates."""
    blocks = [block for piece in pieces for block in piece.blocks]
    tokens: dict[SplitName, list[int]] = {}
    num_documents: dict[SplitName, int] = {}
    for split in SPLITS:
        gone_tokens = [number for group in groups for number in group.dropped_tokens[split]]
        gone_documents = sum(sum(group.dropped_documents[split]) for group in groups)
        tokens[split] = [
            block.num_tokens[split] - gone for block, gone in zip(blocks, gone_tokens, strict=True)
        ]
        num_documents[split] = sum(block.num_documents[split] for block in blocks) - gone_documents
    gone_bytes = sum(each.num_bytes for group in groups for each in group.dropped.values())
    return _Kept(tokens, num_documents, sum(block.num_bytes for block in blocks) - gone_bytes)


def _run_all(
    engine: Engine, function: Callable[[TaskT], Result], tasks: Sequence[TaskT]
) -> list[Result]:
    results = dict(engine.run(function, tasks))
    return [results[number] for number in range(len(tasks))]


def _splits(
    tasks: Sequence[ShardTask], entries: Sequence[ShardEntry], num_documents: dict[SplitName, int]
) -> dict[SplitName, Split]:
    splits: dict[SplitName, Split] = {}
    for split in SPLITS:
        chosen = [entry for task, entry in zip(tasks, entries, strict=True) if task.split == split]
        splits[split] = Split(
            num_tokens=sum(entry.num_tokens for entry in chosen),
            num_documents=num_documents[split],
            shards=msgspec.Raw(msgspec.json.encode(chosen)),
        )
    return splits


def _remove_others(storage: Storage, manifest: DatasetManifest) -> None:
    """Deletes shards of an earlier attempt with other inputs, and partial files."""
    for split in SPLITS:
        expected = {
            name(split, shard)
            for shard in range(manifest.num_shards(split))
            for name in (tokens_name, documents_name)
        }
        for name in storage.sizes(split).keys() - expected:
            storage.delete(name)
    storage.discard_unfinished()


def _unknown_files(found: FoundFiles) -> dict[str, Dropped]:
    if not found.unknown:
        return {}
    names, sizes = zip(*found.unknown, strict=True)
    return {
        UNKNOWN_KIND: Dropped(
            num_documents=len(names), num_bytes=sum(sizes), examples=list(names[:MOST_EXAMPLES])
        )
    }


def _nothing_left(config: PrepareConfig, dropped: dict[str, Dropped]) -> DataError:
    reasons = "; ".join(
        f"{reason}: {each.num_documents:,}, such as {each.examples[0]}"
        for reason, each in dropped.items()
    )
    return DataError(
        f"{', '.join(config.sources)}: no document can be used ({reasons or 'none found'}); check "
        "--field, --separator and --max-document-bytes"
    )


def _no_progress(_done: int, _total: int) -> None:
    pass
