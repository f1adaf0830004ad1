"""Prepares a dataset: plan, tokenize, drop duplicates, write shards, and finally the manifest.

A preparation that was killed at any point resumes when it is started again. A complete dataset is
left unchanged, and a different dataset at the same location is an error.

Shards have a fixed number of tokens. A split is the stream of its documents' tokens in source
order; shard k starts at token k times the shard size. The task of a shard reads only the few blocks
that the shard overlaps.
"""

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError, UsageError
from paceline.core.lock import owned
from paceline.core.units import Progress
from paceline.data.documents import OUTSIDE_LINK, UNKNOWN_KIND
from paceline.data.manifest import (
    DOCUMENT_END_DTYPE,
    MANIFEST,
    SCHEMA,
    SPLITS,
    TOKENIZER,
    DatasetManifest,
    Dropped,
    ShardEntry,
    SourceFile,
    Split,
    SplitName,
    documents_name,
    encode_manifest,
    read_manifest,
    tokens_name,
)
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.duplicates import (
    GroupResult,
    find_duplicates,
    gather_duplicates,
    kept_rows,
    plan_duplicates,
    read_table,
    write_table,
)
from paceline.data.prepare.engines import Engine, TaskT, open_engine
from paceline.data.prepare.job import (
    MOST_EXAMPLES,
    WORK,
    BlockCounts,
    Job,
    Result,
    is_heldout,
    merge_dropped,
    once,
    plan_name,
    reading_options,
)
from paceline.data.prepare.tokenize import PieceTask, plan_pieces, tokenize_piece
from paceline.data.source_files import FoundFiles, find_files
from paceline.data.storage import Storage, open_storage
from paceline.data.tokenizer import Tokenizer, load_tokenizer


def prepare(config: PrepareConfig, progress: Progress | None = None) -> DatasetManifest:
    """Prepares a dataset, unless it is already prepared, and returns its manifest.

    Args:
        config: The sources, the tokenizer and the output.
        progress: Receives the number of source bytes tokenized and the total.
    """
    inputs = find_inputs(config)
    storage = open_storage(config.out)
    if (finished := _find_and_tidy(inputs, storage)) is not None:
        return finished
    with _owned(config.out):
        # Another command may have prepared it meanwhile.
        if (finished := _find_and_tidy(inputs, storage)) is not None:
            return finished
        return _prepare(config, inputs, storage, progress)


def find_prepared(config: PrepareConfig) -> DatasetManifest | None:
    """Returns the manifest if this dataset is already prepared, None if there is no dataset.

    Raises:
        UsageError: A different dataset is prepared at that location.
    """
    return _find_and_tidy(find_inputs(config), open_storage(config.out))


def _find_and_tidy(inputs: "Inputs", storage: Storage) -> DatasetManifest | None:
    """Deletes what a command left that was killed after it had written the manifest."""
    finished = find_finished(inputs, storage)
    if finished is not None:
        storage.clear(WORK)
    return finished


def _owned(location: str) -> contextlib.AbstractContextManager[None]:
    """Owns a dataset in a directory. S3 has no locks."""
    return (
        contextlib.nullcontext() if "://" in location else owned(location, "paceline data prepare")
    )


def _prepare(
    config: PrepareConfig, inputs: "Inputs", storage: Storage, progress: Progress | None
) -> DatasetManifest:
    storage.write(TOKENIZER, inputs.tokenizer.json.encode())
    job = make_job(config, inputs)
    tasks = [
        PieceTask(job=job, piece=piece) for piece in plan_pieces(inputs.found.files, job.reading)
    ]
    sizes = [task.piece.num_bytes for task in tasks]
    with open_engine(config) as engine:
        pieces = _run_all(engine, tokenize_piece, tasks, sizes, progress)
        dropped = [_dropped_files(inputs.found), *(piece.dropped for piece in pieces)]
        blocks = [block for piece in pieces for block in piece.blocks]
        if not blocks:
            raise _nothing_left(config, merge_dropped(dropped))
        plan_id = write_table(job, tasks, pieces)
        partition_tasks, group_tasks = plan_duplicates(job, plan_id, blocks)
        _run_all(engine, find_duplicates, partition_tasks)
        groups = _run_all(engine, gather_duplicates, group_tasks)
        dropped += [group.dropped for group in groups]
        kept = _without_duplicates(blocks, groups)
        shard_tasks = plan_shards(job, plan_id, kept.tokens)
        entries = _run_all(engine, write_shard, shard_tasks)
    for file in inputs.found.files:
        file.require_unchanged()
    splits: dict[SplitName, Split] = {}
    for split in SPLITS:
        written = zip(shard_tasks, entries, strict=True)
        chosen = [entry for task, entry in written if task.split == split]
        splits[split] = Split(
            num_tokens=sum(entry.num_tokens for entry in chosen),
            num_documents=kept.num_documents[split],
            shards=msgspec.Raw(msgspec.json.encode(chosen)),
        )
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
        splits=splits,
    )
    _remove_others(storage, manifest)
    storage.write(MANIFEST, encode_manifest(manifest))
    storage.clear(WORK)
    return manifest


def _run_all(
    engine: Engine,
    function: Callable[[TaskT], Result],
    tasks: Sequence[TaskT],
    sizes: Sequence[int] = (),
    progress: Progress | None = None,
) -> list[Result]:
    """Returns the results in the order of the tasks; reports the sizes of finished tasks."""
    results = {}
    done, total = 0, sum(sizes)
    if progress is not None:
        progress(0, total)
    for number, result in engine.run(function, tasks):
        results[number] = result
        if progress is not None:
            done += sizes[number]
            progress(done, total)
    return [results[number] for number in range(len(tasks))]


def _dropped_files(found: FoundFiles) -> dict[str, Dropped]:
    dropped = {}
    for reason, files in ((UNKNOWN_KIND, found.unknown), (OUTSIDE_LINK, found.outside)):
        if files:
            names, sizes = zip(*files, strict=True)
            dropped[reason] = Dropped(
                num_documents=len(names), num_bytes=sum(sizes), examples=list(names[:MOST_EXAMPLES])
            )
    return dropped


def _nothing_left(config: PrepareConfig, dropped: dict[str, Dropped]) -> DataError:
    reasons = "; ".join(
        f"{reason}: {each.num_documents:,}, such as {each.examples[0]}"
        for reason, each in dropped.items()
    )
    return DataError(
        f"{', '.join(config.sources)}: no document can be used ({reasons or 'none found'}); check "
        "--field, --separator and --max-document-bytes"
    )


class _Kept(NamedTuple):
    tokens: dict[SplitName, list[int]]
    """Number of kept tokens, by block."""
    num_documents: dict[SplitName, int]
    num_bytes: int


def _without_duplicates(blocks: Sequence[BlockCounts], groups: Sequence[GroupResult]) -> _Kept:
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


class Inputs(NamedTuple):
    """The tokenizer, the files and the options that determine the bytes of the shards."""

    tokenizer: Tokenizer
    found: FoundFiles
    options: dict[str, str | int | float | bool | None]

    @property
    def sources(self) -> list[SourceFile]:
        """The files as a manifest lists them."""
        return [
            SourceFile(name=file.name, num_bytes=file.num_bytes, modified_ns=file.modified_ns)
            for file in self.found.files
        ]


def find_inputs(config: PrepareConfig) -> Inputs:
    """Loads the tokenizer and finds the files."""
    tokenizer = load_tokenizer(config.tokenizer, config.end_of_document)
    found = find_files(config.sources, None if "://" in config.out else config.out)
    options: dict[str, str | int | float | bool | None] = {
        "separator": config.separator_bytes.decode(),
        "field": config.field,
        "max_document_bytes": config.max_document_bytes,
        "heldout": config.heldout,
        "shard_tokens": config.shard_tokens,
        "end_of_document": tokenizer.end_of_document,
    }
    return Inputs(tokenizer, found, options)


def make_job(config: PrepareConfig, inputs: Inputs) -> Job:
    """Returns the settings that all tasks share."""
    return Job(
        out=config.out if "://" in config.out else str(pathlib.Path(config.out).absolute()),
        reading=reading_options(config),
        tokenizer_blake3=inputs.tokenizer.blake3,
        end_of_document=config.end_of_document,
        heldout=config.heldout,
        shard_tokens=config.shard_tokens,
    )


def find_finished(inputs: Inputs, storage: Storage) -> DatasetManifest | None:
    """Returns the manifest if these inputs are prepared in a storage, None if it has no dataset."""
    try:
        storage.read_range(MANIFEST, 0, 1)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UsageError(f"--out {storage.url} is a file; name a directory") from error
    manifest = read_manifest(storage)
    difference = _difference(manifest, inputs)
    if difference:
        raise UsageError(
            f"{storage.url} already contains a dataset that was prepared differently: "
            f"{difference}; name another --out, or delete that dataset"
        )
    return manifest


def _difference(manifest: DatasetManifest, inputs: Inputs) -> str:
    """Returns the first difference between a dataset and the inputs; empty if there is none."""
    if manifest.tokenizer_blake3 != inputs.tokenizer.blake3:
        return "with another tokenizer"
    for name, value in inputs.options.items():
        if manifest.options.get(name) != value:
            flag = "--" + name.replace("_", "-")
            return f"{flag} was {manifest.options.get(name)!r} and is {value!r}"
    before = {source.name: source for source in manifest.sources}
    now = {source.name: source for source in inputs.sources}
    for name in sorted(before.keys() | now.keys()):
        if name not in before:
            return f"{name} is new"
        if name not in now:
            return f"{name} is gone"
        if before[name] != now[name]:
            return f"{name} has changed since"
    return ""


class ShardTask(msgspec.Struct, frozen=True, kw_only=True):
    """A shard to write."""

    job: Job
    plan_id: str
    split: SplitName
    shard: int
    num_tokens: int
    first_block: int
    """The first block that the shard overlaps."""
    num_skipped: int
    """Tokens of that block that belong to earlier shards."""

    @property
    def label(self) -> str:
        """Name of the task in error messages."""
        return tokens_name(self.split, self.shard)


def plan_shards(
    job: Job, plan_id: str, kept_tokens: Mapping[SplitName, Sequence[int]]
) -> list[ShardTask]:
    """Returns the tasks of all shards, given the number of kept tokens of each block."""
    tasks = []
    for split in SPLITS:
        ends = np.cumsum(np.array(kept_tokens[split], np.int64))
        total = int(ends[-1]) if len(ends) else 0
        for shard, start in enumerate(range(0, total, job.shard_tokens)):
            first_block = int(np.searchsorted(ends, start, side="right"))
            before = int(ends[first_block - 1]) if first_block else 0
            tasks.append(
                ShardTask(
                    job=job,
                    plan_id=plan_id,
                    split=split,
                    shard=shard,
                    num_tokens=min(job.shard_tokens, total - start),
                    first_block=first_block,
                    num_skipped=start - before,
                )
            )
    return tasks


def write_shard(task: ShardTask) -> ShardEntry:
    """Writes a shard's tokens and document ends and then its marker, unless the marker exists."""
    marker = plan_name(task.plan_id, f"shards/{task.split}-{task.shard:08d}.json")
    return once(task.job, marker, ShardEntry, lambda: _write_files(task))


def _write_files(task: ShardTask) -> ShardEntry:
    shard_tokens = np.empty(task.num_tokens, task.job.tokenizer().dtype)
    shard_ends = []
    block = task.first_block
    at = -task.num_skipped  # Start of the block in the shard.
    while at < task.num_tokens:
        tokens, ends = _kept_documents(task, block)
        start, end = max(at, 0), min(at + len(tokens), task.num_tokens)
        shard_tokens[start:end] = tokens[start - at : end - at]
        ends = ends + at
        shard_ends.append(ends[(ends > 0) & (ends <= task.num_tokens)])
        at += len(tokens)
        block += 1
    documents = np.concatenate(shard_ends).astype(DOCUMENT_END_DTYPE).tobytes()
    content = shard_tokens.view(np.uint8).data
    storage = task.job.storage()
    storage.write(tokens_name(task.split, task.shard), content)
    storage.write(documents_name(task.split, task.shard), documents)
    return ShardEntry(
        num_tokens=task.num_tokens,
        num_documents=len(documents) // 4,
        tokens_blake3=blake3.blake3(content).hexdigest(),
        documents_blake3=blake3.blake3(documents).hexdigest(),
    )


def _kept_documents(
    task: ShardTask, block: int
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
    """Returns the tokens of a block's kept documents, and the end of each document."""
    files = read_table(task.job, task.plan_id).block_files(task.job, block)
    rows = files.rows()
    kept = kept_rows(task.job, task.plan_id, block, rows)
    is_here = is_heldout(rows, task.job) == (task.split == "heldout")
    kept, lengths = kept[is_here], rows["num_tokens"][is_here].astype(np.int64)
    if not kept.any():
        return np.empty(0, np.uint16), np.empty(0, np.int64)
    tokens = files.tokens(task.split)
    if not kept.all():
        tokens = tokens[np.repeat(kept, lengths)]
    return tokens, np.cumsum(lengths[kept])
