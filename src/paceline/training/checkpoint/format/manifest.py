"""The manifest of a checkpoint: what is in it, and how to know that it is intact.

Stored as ``{"blake3": DIGEST, "manifest": {...}}``, so that the manifest can be trusted before it
is used: any other bytes than those that were written are refused.

A tensor's chunks have digests by block of `block_bytes`, so that who needs a few rows of a large
chunk reads and verifies only the blocks that they lie in.
"""

import math
from typing import Any, TypeAlias

import blake3
import msgspec

from paceline.records.codecs import UNDECODABLE
from paceline.training.checkpoint.errors import REMEDY, CheckpointError, DamagedCheckpointError

MANIFEST = "manifest.json"
SCHEMA = 1
DEFAULT_BLOCK_BYTES = 2**24

Json: TypeAlias = Any
"""What JSON can hold: None, booleans, numbers, text, lists and dictionaries of these by text."""


class ChunkEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a tensor's elements, where it lies, and its digests."""

    offsets: list[int]
    """Where it begins in the tensor, by dimension."""
    shape: list[int]
    file: int
    """Place of its file in the manifest's list."""
    start: int
    """First byte in the file."""
    blake3: list[str]
    """Of each block of its bytes; the last block may be shorter."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor as a whole, and the chunks that the ranks have saved of it."""

    dtype: str
    """As safetensors calls it."""
    shape: list[int]
    chunks: list[ChunkEntry]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of tensors."""

    name: str
    rank: int
    """Who has written it."""
    num_bytes: int
    header_bytes: int
    """Bytes before the first tensor."""
    header_blake3: str
    blake3: str
    """Of the whole file."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is made of."""

    schema: int
    step: int
    save_id: str
    """Tells two attempts to save the same step apart."""
    world_size: int
    block_bytes: int
    identity: msgspec.Raw
    """What the run says of itself: position in the data, schedule, config, fingerprints."""
    ranks: list[msgspec.Raw]
    """What each rank says of itself, such as the state of its random numbers."""
    values: dict[str, msgspec.Raw]
    """Entries of the state that are no tensors, by name."""
    tensors: dict[str, TensorEntry]
    files: list[FileEntry]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.num_bytes for file in self.files)


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    blake3: str
    manifest: msgspec.Raw


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the bytes that are stored."""
    return _seal(msgspec.json.encode(manifest))


def decode_manifest(content: bytes, where: str) -> Manifest:
    """Returns the manifest, if these are the bytes that were stored.

    Args:
        content: The file's bytes.
        where: The file, for errors.
    """
    try:
        body = bytes(msgspec.json.decode(content, type=_Envelope).manifest)
        if _seal(body) != content:
            raise DamagedCheckpointError(
                f"{where}: is corrupted: it does not match its digest; {REMEDY}"
            )
        schema = msgspec.json.decode(body).get("schema")
        if schema != SCHEMA:
            raise CheckpointError(
                f"{where}: schema {schema}, but this version of Paceline reads {SCHEMA}; load it "
                "with the version that saved it"
            )
        return msgspec.json.decode(body, type=Manifest)
    except (*UNDECODABLE, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{where}: not the manifest of a checkpoint: {error}; {REMEDY}"
        ) from error


def block_digests(content: memoryview, block_bytes: int) -> list[str]:
    """Returns the digest of each block of a chunk's bytes; none of an empty one."""
    return [
        blake3.blake3(content[start : start + block_bytes]).hexdigest()
        for start in range(0, len(content), block_bytes)
    ]


def num_elements(chunk: ChunkEntry) -> int:
    """Returns how many elements a chunk has."""
    return math.prod(chunk.shape)


def _seal(body: bytes) -> bytes:
    digest = blake3.blake3(body).hexdigest()
    return msgspec.json.encode(_Envelope(digest, msgspec.Raw(body))) + b"\n"
