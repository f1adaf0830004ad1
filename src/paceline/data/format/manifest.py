"""The manifest of a prepared dataset: what is in it, and how to know that it is intact.

A split ("train", "heldout") is one stream of tokens, cut into shards of `shard_tokens` tokens each,
the last one shorter. Token t is in shard t // shard_tokens, at t % shard_tokens: nothing has to be
searched. The entries of the shards, digests above all, stay undecoded until somebody verifies or
fetches a shard, so that a manifest of 10^5 shards opens in milliseconds.
"""

import functools
from typing import Literal, NamedTuple

import blake3
import msgspec

from paceline.core.errors import DataError
from paceline.data.storage import Storage
from paceline.records.codecs import UNDECODABLE

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SCHEMA = 1
DEFAULT_SHARD_TOKENS = 2**26

SplitName = Literal["train", "heldout"]
TokenType = Literal["uint16", "uint32"]

SPLITS: tuple[SplitName, ...] = ("train", "heldout")

DOCUMENT_END_DTYPE = "<u4"
"""The type of the ends of a shard's documents."""
_DOCUMENT_END_BYTES = 4


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shard's counts and digests."""

    num_tokens: int
    num_documents: int
    """Documents that end in this shard."""
    tokens_blake3: str
    documents_blake3: str


class ShardSizes(NamedTuple):
    """Bytes of a shard's two files."""

    tokens: int
    documents: int


class Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of tokens."""

    num_tokens: int
    num_documents: int
    shards: msgspec.Raw
    """The entries of its shards, in order, as JSON."""

    def shard_entries(self) -> list[ShardEntry]:
        """Decodes the entries of the shards."""
        return msgspec.json.decode(self.shards, type=list[ShardEntry])


class SourceFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that documents were read from, as it was then."""

    name: str
    num_bytes: int
    modified_ns: int


class Dropped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents that were left out for one reason."""

    num_documents: int
    num_bytes: int
    examples: list[str]
    """Where some of them are."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What a prepared dataset is made of."""

    schema: int
    dtype: TokenType
    shard_tokens: int
    vocab_size: int
    end_of_document: int
    """The token that follows every document."""
    tokenizer_blake3: str
    options: dict[str, str | int | float | bool | None]
    """The options that decide the bytes of the shards."""
    sources: list[SourceFile]
    num_source_bytes: int
    """Bytes of the documents that were kept, before they became tokens."""
    dropped: dict[str, Dropped]
    """What was left out, by reason."""
    splits: dict[SplitName, Split]

    @property
    def token_bytes(self) -> int:
        """Bytes per token in a shard."""
        return 2 if self.dtype == "uint16" else 4

    @property
    def stored_dtype(self) -> str:
        """The type of a shard's tokens with its byte order, as NumPy writes it."""
        return f"<u{self.token_bytes}"

    @property
    def source_bytes_per_token(self) -> float:
        """Bytes of text that a token stands for, in the mean over all splits."""
        num_tokens = sum(split.num_tokens for split in self.splits.values())
        return self.num_source_bytes / max(1, num_tokens)

    def shard_sizes(self, entry: ShardEntry) -> ShardSizes:
        """Returns how many bytes the two files of a shard have."""
        return ShardSizes(
            tokens=entry.num_tokens * self.token_bytes,
            documents=entry.num_documents * _DOCUMENT_END_BYTES,
        )

    def num_shards(self, split: SplitName) -> int:
        """Returns how many shards a split has."""
        return -(-self.splits[split].num_tokens // self.shard_tokens)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The identity of this dataset: equal manifests describe equal bytes."""
        return blake3.blake3(encode_manifest(self)).hexdigest()


def tokens_name(split: SplitName, shard: int) -> str:
    """Returns the name of a shard's tokens."""
    return f"{split}/{shard:08d}.tokens"


def documents_name(split: SplitName, shard: int) -> str:
    """Returns the name of the ends of the documents in a shard."""
    return f"{split}/{shard:08d}.documents"


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the bytes that are stored."""
    return msgspec.json.encode(manifest) + b"\n"


def read_manifest(storage: Storage) -> Manifest:
    """Reads the manifest of a dataset; every defect is an error that names the field."""
    where = f"{storage.url}/{MANIFEST}"
    try:
        content = storage.read(MANIFEST)
    except FileNotFoundError:
        raise DataError(
            f"{storage.url}: no {MANIFEST}, so this is not a dataset, or an unfinished one; run "
            "`paceline data prepare` (again)"
        ) from None
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except UNDECODABLE as error:
        raise DataError(f"{where}: not a manifest: {error}; prepare the dataset again") from error
    if manifest.schema != SCHEMA:
        raise DataError(
            f"{where}: schema {manifest.schema}, but this version of Paceline reads {SCHEMA}; "
            "prepare the dataset again"
        )
    # Of the bytes as they are stored: encoding a large manifest again takes longer than reading.
    manifest.__dict__["fingerprint"] = blake3.blake3(content).hexdigest()
    return manifest
