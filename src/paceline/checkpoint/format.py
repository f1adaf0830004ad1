"""Format of a checkpoint: the manifest of its contents, the safetensors files, and verified reads.

The manifest is stored as ``{"blake3": DIGEST, "manifest": {...}}``, so that it is verified before
it is used: any change to its bytes is rejected. Each chunk of a tensor has one digest per block of
`block_bytes`. A reader of a few rows of a large chunk reads and verifies only the blocks that
contain them, and gets bytes only if they match their digests.

A safetensors file is a header that locates the tensors, followed by their bytes. The header does
not depend on the tensors' values. A file is therefore written front to back, one tensor at a time,
and any program that reads safetensors can open it.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import blake3
import msgspec

from paceline.checkpoint.errors import REMEDY, CheckpointError, DamagedCheckpointError, cannot_read
from paceline.core.errors import TruncatedError
from paceline.core.units import one_line
from paceline.data.storage import Storage
from paceline.records.store import UNDECODABLE, Count, Positive

MANIFEST = "manifest.json"
SCHEMA = 1
DEFAULT_BLOCK_BYTES = 2**24

Json: TypeAlias = Any
"""JSON value: None, boolean, number, string, list, or dictionary with string keys."""


class ChunkEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a tensor's elements, its location, and its digests."""

    offsets: list[Count]
    """Start in the tensor, by dimension."""
    shape: list[Count]
    file: Count
    """Index of its file in the manifest's list."""
    start: Count
    """Offset of its first byte in the file."""
    blake3: list[str]
    """Digest of each block of its bytes; the last block may be shorter."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole tensor, and the chunks in which ranks saved it."""

    dtype: str
    """Safetensors name of the dtype."""
    shape: list[Count]
    chunks: list[ChunkEntry]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of tensors."""

    name: str
    rank: Count
    """Rank that wrote the file."""
    num_bytes: Count
    header_bytes: Count
    """Bytes before the first tensor."""
    header_blake3: str
    blake3: str
    """Digest of the whole file."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a checkpoint."""

    schema: int
    step: Count
    save_id: str
    """Distinguishes two attempts to save the same step."""
    world_size: Positive
    block_bytes: Positive
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
    """Decodes a manifest; raises unless the bytes match their digest."""
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
        manifest = msgspec.json.decode(body, type=Manifest)
    except (*UNDECODABLE, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{where}: not the manifest of a checkpoint: {one_line(error)}; {REMEDY}"
        ) from error
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise DamagedCheckpointError(
                f"{where}: tensor {name!r} has the dtype {tensor.dtype!r}, which this version of "
                f"Paceline does not know; {REMEDY}"
            )
    return manifest


def block_digests(content: memoryview, block_bytes: int) -> list[str]:
    """Returns the digest of each block of a chunk's bytes; empty for an empty chunk."""
    return [
        blake3.blake3(content[start : start + block_bytes]).hexdigest()
        for start in range(0, len(content), block_bytes)
    ]


def _seal(body: bytes) -> bytes:
    digest = blake3.blake3(body).hexdigest()
    return msgspec.json.encode(_Envelope(digest, msgspec.Raw(body))) + b"\n"


_DTYPES_BY_BYTES = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
    2: ("U16", "I16", "F16", "BF16"),
    4: ("U32", "I32", "F32"),
    8: ("U64", "I64", "F64", "C64"),
}
ITEM_BYTES = {name: size for size, names in _DTYPES_BY_BYTES.items() for name in names}
"""Bytes per element, by safetensors name of the dtype."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A chunk of a tensor, as stored in a file."""

    name: str
    """Name of the tensor."""
    dtype: str
    offsets: tuple[int, ...]
    """Start of the chunk in the tensor."""
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def label(self) -> str:
        """Name in the file; a part of a tensor has its ranges in the name."""
        if self.shape == self.full_shape:
            return self.name
        ranges = zip(self.offsets, self.shape, strict=True)
        return f"{self.name}[{','.join(f'{start}:{start + size}' for start, size in ranges)}]"


def order_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns pieces widest dtype first, which aligns each to its element size."""
    return sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece.dtype], piece.label))


def encode_header(pieces: Sequence[Piece]) -> bytes:
    """Returns the header of a file in which the pieces follow back to back."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for piece in pieces:
        end = start + piece.num_bytes
        entries[piece.label] = {
            "dtype": piece.dtype,
            "shape": piece.shape,
            "data_offsets": (start, end),
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def split_into_files(pieces: Sequence[Piece], max_file_bytes: int) -> list[list[Piece]]:
    """Groups pieces into files of bounded size; a larger piece gets its own file."""
    files: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not files or piece.num_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(piece)
        room -= piece.num_bytes
    return files


def read_block(
    storage: Storage, manifest: Manifest, name: str, chunk: ChunkEntry, block: int
) -> bytes:
    """Returns one block of a chunk; raises if it does not match its digest."""
    file = manifest.files[chunk.file]
    start, end = block_range(manifest, name, chunk, block)
    content = read_bytes(storage, file.name, start, end)
    if blake3.blake3(content).hexdigest() != chunk.blake3[block]:
        raise DamagedCheckpointError(
            f"{storage.url}/{file.name}: tensor {name!r}, saved by rank {file.rank}, is "
            f"corrupted: bytes {start} to {end} do not match their digest; {REMEDY}"
        )
    return content


def block_range(manifest: Manifest, name: str, chunk: ChunkEntry, block: int) -> tuple[int, int]:
    """Returns the start and end of a block in its file, in bytes."""
    num_bytes = math.prod(chunk.shape) * ITEM_BYTES[manifest.tensors[name].dtype]
    start = chunk.start + block * manifest.block_bytes
    return start, min(start + manifest.block_bytes, chunk.start + num_bytes)


def verify_header(storage: Storage, manifest: Manifest, file_number: int) -> None:
    """Reads the header of a file; raises if it does not match its digest."""
    file = manifest.files[file_number]
    header = read_bytes(storage, file.name, 0, file.header_bytes)
    if blake3.blake3(header).hexdigest() != file.header_blake3:
        raise DamagedCheckpointError(
            f"{storage.url}/{file.name}: the header, saved by rank {file.rank}, is corrupted: it "
            f"does not match its digest; {REMEDY}"
        )


def wrong_sizes(storage: Storage, manifest: Manifest) -> dict[str, str]:
    """Returns a message per missing, truncated or overlong file, without reading any of them."""
    try:
        sizes = storage.sizes()
    except OSError as error:
        raise cannot_read(storage.url, error) from error
    found: dict[str, str] = {}
    for file in manifest.files:
        what = f"{storage.url}/{file.name}, saved by rank {file.rank},"
        if file.name not in sizes:
            found[file.name] = f"{what} is missing"
        elif sizes[file.name] != file.num_bytes:
            size = sizes[file.name]
            found[file.name] = f"{what} has {size:,} bytes instead of {file.num_bytes:,}"
    return found


def read_bytes(storage: Storage, name: str, start: int, end: int) -> bytes:
    """Returns a range of bytes of a file; raises if any are missing."""
    try:
        return storage.read_range(name, start, end)
    except OSError as error:
        raise cannot_read(f"{storage.url}/{name}", error) from error
    except TruncatedError as error:
        raise DamagedCheckpointError(
            f"{storage.url}/{name}: is truncated before byte {end:,}; {REMEDY}"
        ) from error
