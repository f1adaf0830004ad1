"""The manifest of a checkpoint: its contents, and the digests that verify them.

Stored as ``{"blake3": DIGEST, "manifest": {...}}``, so that the manifest is verified before it is
used: any change to its bytes is rejected.

Each chunk of a tensor has one digest per block of `block_bytes`. A reader of a few rows of a large
chunk therefore reads and verifies only the blocks that contain them.
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
"""JSON value: None, boolean, number, string, list, or dictionary with string keys."""


class ChunkEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a tensor's elements, its location, and its digests."""

    offsets: list[int]
    """Start in the tensor, by dimension."""
    shape: list[int]
    file: int
    """Index of its file in the manifest's list."""
    start: int
    """Offset of its first byte in the file."""
    blake3: list[str]
    """Digest of each block of its bytes; the last block may be shorter."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole tensor, and the chunks in which ranks saved it."""

    dtype: str
    """Safetensors name of the dtype."""
    shape: list[int]
    chunks: list[ChunkEntry]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of tensors."""

    name: str
    rank: int
    """Rank that wrote the file."""
    num_bytes: int
    header_bytes: int
    """Bytes before the first tensor."""
    header_blake3: str
    blake3: str
    """Digest of the whole file."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a checkpoint."""

    schema: int
    step: int
    save_id: str
    """Distinguishes two attempts to save the same step."""
    world_size: int
    block_bytes: int
    identity: msgspec.Raw
    """Metadata of the run, such as its model and its position in the data."""
    ranks: list[msgspec.Raw]
    """Metadata of each rank, such as its random state."""
    values: dict[str, msgspec.Raw]
    """Entries of the state that are not tensors, by name."""
    tensors: dict[str, TensorEntry]
    files: list[FileEntry]

    @property
    def num_bytes(self) -> int:
        """Total size of all tensor files."""
        return sum(file.num_bytes for file in self.files)


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    blake3: str
    manifest: msgspec.Raw


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the manifest as it is stored."""
    return _seal(msgspec.json.encode(manifest))


def decode_manifest(content: bytes, where: str) -> Manifest:
    """Decodes a manifest; raises unless the bytes match their digest.

    Args:
        content: Bytes of the file.
        where: Path of the file, for errors.
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
    """Returns the digest of each block of a chunk's bytes; empty for an empty chunk."""
    return [
        blake3.blake3(content[start : start + block_bytes]).hexdigest()
        for start in range(0, len(content), block_bytes)
    ]


def num_elements(chunk: ChunkEntry) -> int:
    """Returns the number of elements of a chunk."""
    return math.prod(chunk.shape)


def _seal(body: bytes) -> bytes:
    digest = blake3.blake3(body).hexdigest()
    return msgspec.json.encode(_Envelope(digest, msgspec.Raw(body))) + b"\n"
