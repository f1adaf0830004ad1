"""The manifest of a prepared dataset: its contents, and digests to check its integrity.

A split ("train", "heldout") is one stream of tokens, cut into shards of `shard_tokens` tokens each;
the last one may be shorter. Token t is in shard t // shard_tokens, at t % shard_tokens: no search
is needed. The shard entries, which are mostly digests, are decoded only to verify or fetch a shard,
so a manifest of 10^5 shards opens in milliseconds.
"""

import functools
from typing import Literal, NamedTuple

import blake3
import msgspec

from paceline.core.errors import DataError
from paceline.core.units import one_line
from paceline.data.storage import Storage
from paceline.records.store import UNDECODABLE, Count, Int64, Positive

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SCHEMA = 1

SplitName = Literal["train", "heldout"]
TokenType = Literal["uint16", "uint32"]

SPLITS: tuple[SplitName, ...] = ("train", "heldout")

DOCUMENT_END_DTYPE = "<u4"
"""The dtype of the document ends in a shard."""
_DOCUMENT_END_BYTES = 4


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shard's counts and digests."""

    num_tokens: Count
    num_documents: Count
    """Documents that end in this shard."""
    tokens_blake3: str
    documents_blake3: str


class ShardSizes(NamedTuple):
    """Bytes of a shard's two files."""

    tokens: int
    documents: int


class Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of tokens."""

    num_tokens: Count
    num_documents: Count
    shards: msgspec.Raw
    """The shard entries in order, as JSON."""

    def shard_entries(self) -> list[ShardEntry]:
        """Decodes the shard entries."""
        try:
            return msgspec.json.decode(self.shards, type=list[ShardEntry])
        except UNDECODABLE as error:
            raise DataError(
                f"{MANIFEST}: its list of shards is damaged: {one_line(error)}; prepare the "
                "dataset again"
            ) from error


class SourceFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that documents were read from, and its state at that time."""

    name: str
    num_bytes: Count
    modified_ns: Int64


class Dropped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents that were dropped for one reason."""

    num_documents: Count
    num_bytes: Count
    examples: list[str]
    """Locations of some of them."""


class DatasetManifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True
):
    """The description of a prepared dataset."""

    schema: int
    dtype: TokenType
    shard_tokens: Positive
    vocab_size: Positive
    end_of_document: Count
    """The token that follows every document."""
    tokenizer_blake3: str
    options: dict[str, str | int | float | bool | None]
    """The options that determine the bytes of the shards."""
    sources: list[SourceFile]
    num_source_bytes: Count
    """Bytes of the kept documents before tokenization."""
    dropped: dict[str, Dropped]
    """Dropped documents, by reason."""
    splits: dict[SplitName, Split]

    @property
    def token_bytes(self) -> int:
        """Bytes per token in a shard."""
        return 2 if self.dtype == "uint16" else 4

    @property
    def stored_dtype(self) -> str:
        """The dtype of a shard's tokens with its byte order, in NumPy notation."""
        return f"<u{self.token_bytes}"

    @property
    def source_bytes_per_token(self) -> float:
        """Mean number of bytes of text per token, over all splits."""
        num_tokens = sum(split.num_tokens for split in self.splits.values())
        return self.num_source_bytes / max(1, num_tokens)

    def shard_sizes(self, entry: ShardEntry) -> ShardSizes:
        """Returns the sizes of the two files of a shard in bytes."""
        return ShardSizes(
            tokens=entry.num_tokens * self.token_bytes,
            documents=entry.num_documents * _DOCUMENT_END_BYTES,
        )

    def num_shards(self, split: SplitName) -> int:
        """Returns the number of shards of a split."""
        return -(-self.splits[split].num_tokens // self.shard_tokens)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest that identifies the dataset: equal manifests describe equal bytes."""
        return blake3.blake3(encode_manifest(self)).hexdigest()


def tokens_name(split: SplitName, shard: int) -> str:
    """Returns the name of a shard's token file."""
    return f"{split}/{shard:08d}.tokens"


def documents_name(split: SplitName, shard: int) -> str:
    """Returns the name of a shard's file of document ends."""
    return f"{split}/{shard:08d}.documents"


def encode_manifest(manifest: DatasetManifest) -> bytes:
    """Returns the manifest as the bytes that are stored."""
    return msgspec.json.encode(manifest) + b"\n"


def read_manifest(storage: Storage) -> DatasetManifest:
    """Reads the manifest of a dataset; the error for an invalid one names the field."""
    where = f"{storage.url}/{MANIFEST}"
    try:
        content = storage.read(MANIFEST)
    except FileNotFoundError:
        raise DataError(
            f"{storage.url}: no {MANIFEST}, so this is not a dataset, or an unfinished one; run "
            "`paceline data prepare` (again)"
        ) from None
    try:
        manifest = msgspec.json.decode(content, type=DatasetManifest)
    except UNDECODABLE as error:
        raise DataError(
            f"{where}: not a manifest: {one_line(error)}; prepare the dataset again"
        ) from error
    if manifest.schema != SCHEMA:
        raise DataError(
            f"{where}: schema {manifest.schema}, but this version of Paceline reads {SCHEMA}; "
            "prepare the dataset again"
        )
    # Computed from the stored bytes: re-encoding a large manifest takes longer than reading it.
    manifest.__dict__["fingerprint"] = blake3.blake3(content).hexdigest()
    return manifest
