"""The settings that all tasks of a preparation share, and the names of intermediate files.

All intermediate files are below `WORK`. Each file is written atomically, and a task writes its
marker last: a task whose marker exists is not run again.

The inputs of a preparation, and the check whether they are already prepared.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import blake3
import msgspec

from paceline.core.errors import DataError, UsageError
from paceline.data.manifest import (
    MANIFEST,
    TOKENIZER,
    DatasetManifest,
    SourceFile,
    SplitName,
    read_manifest,
)
from paceline.data.prepare.config import PrepareConfig, SourceConfig
from paceline.data.sources.files import FoundFile, FoundFiles, find_files
from paceline.data.sources.read import ReadOptions
from paceline.data.storage import Storage, open_storage
from paceline.data.tokenizer import Tokenizer, load_tokenizer

WORK = "_work"
_LAYOUT = 1
"""Version of the intermediate files; changing it prevents the reuse of older ones."""


class Task(Protocol):
    """A unit of work for a worker."""

    @property
    def label(self) -> str:
        """Name of the task in error messages."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a preparation."""

    out: str
    """Location of the shards: an absolute path or a URL."""
    reading: ReadOptions
    tokenizer_blake3: str
    end_of_document: str | None
    heldout: float
    shard_tokens: int

    @property
    def heldout_below(self) -> int:
        """Upper bound of the first 8 hash bytes, little-endian, of held-out documents."""
        return int(self.heldout * 2**64)

    def storage(self) -> Storage:
        """Opens the storage for the shards."""
        return open_storage(self.out)

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer, once per process."""
        return _load(self.out, self.tokenizer_blake3, self.end_of_document)


def digest(*values: object) -> str:
    """Returns a digest of values, in 32 hexadecimal characters."""
    return blake3.blake3(msgspec.json.encode((_LAYOUT, *values))).hexdigest(length=16)


def piece_name(piece_id: str, what: str) -> str:
    """Returns the name of a file of a piece."""
    return f"{WORK}/pieces/{piece_id}/{what}"


def block_name(piece_id: str, block: int, what: str) -> str:
    """Returns the name of a file of a piece's block."""
    return piece_name(piece_id, f"{block:06d}.{what}")


def block_tokens(split: SplitName) -> str:
    """Returns the suffix of a block's token file of a split."""
    return f"{split}.tokens"


def plan_name(plan_id: str, what: str) -> str:
    """Returns the name of a file of a plan, which stands for one exact set of pieces."""
    return f"{WORK}/plans/{plan_id}/{what}"


@functools.lru_cache(maxsize=1)
def _load(out: str, tokenizer_blake3: str, end_of_document: str | None) -> Tokenizer:
    where = f"{out}/{TOKENIZER}"
    tokenizer = Tokenizer(open_storage(out).read(TOKENIZER).decode(), end_of_document, where)
    if tokenizer.blake3 != tokenizer_blake3:
        raise DataError(
            f"{where} is not the tokenizer that this command started with; is another paceline "
            "data prepare writing to the same place? Run this command again when the other one "
            "has finished"
        )
    return tokenizer


class Inputs(NamedTuple):
    """The tokenizer, the files and the options that determine the bytes of the shards."""

    tokenizer: Tokenizer
    found: FoundFiles
    options: dict[str, str | int | float | bool | None]

    @property
    def files(self) -> Sequence[FoundFile]:
        """The files to read."""
        return self.found.files

    @property
    def sources(self) -> list[SourceFile]:
        """The files as a manifest lists them."""
        return [
            SourceFile(name=file.name, num_bytes=file.num_bytes, modified_ns=file.modified_ns)
            for file in self.files
        ]


def find_prepared(config: PrepareConfig) -> DatasetManifest | None:
    """Returns the manifest if this dataset is already prepared, None if there is no dataset.

    Raises:
        UsageError: A different dataset is prepared at that location.
    """
    return find_finished(find_inputs(config), open_storage(config.out))


def reading_options(config: SourceConfig) -> ReadOptions:
    """Returns the options that determine the documents of a file."""
    return ReadOptions(
        separator=config.separator_bytes,
        field=config.field,
        max_document_bytes=config.max_document_bytes,
    )


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
